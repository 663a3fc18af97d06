"""`python -m ndtp_kernels.aot`: see `ndtp_kernels.tools.aot`."""

from ndtp_kernels.tools.aot import main

if __name__ == "__main__":
    main()
