"""Tells a compiler that is there of `Between`; imported once it is, since importing it takes seconds.

A graph follows what lies between by itself.  Where it breaks between the layers of a pair, code that gets a `Between`
runs eagerly: the compiler would take its sizes, those of the whole, for those of its memory.
"""

import torch._dynamo.config

from ndtp.models.between import Between

torch._dynamo.config.nontraceable_tensor_subclasses.add(Between)
