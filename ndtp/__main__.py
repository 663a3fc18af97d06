from ndtp.cli import main

main()
