"""`python -m equipoise`."""

from equipoise.cli.app import main

main()
