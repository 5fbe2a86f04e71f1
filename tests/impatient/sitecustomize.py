"""On PYTHONPATH, this makes Flower's SuperNode look for messages often: it sleeps 3 s between looks otherwise."""

import sys
import time

if sys.argv and sys.argv[0].endswith("flower-supernode"):
    _sleep = time.sleep
    time.sleep = lambda seconds: _sleep(min(seconds, 0.2))
