"""`python -m dustin_trt.cli`."""

import sys

from dustin_trt.cli import main

sys.exit(main())
