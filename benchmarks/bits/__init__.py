"""The parts of `benchmarks/same_bits.py`, which compares two commits bit for bit.

No module here imports Equipoise. The commits are spoken to by their command line and by the files of run folders, so
that the comparison outlives every move and change of name inside the package.
"""
