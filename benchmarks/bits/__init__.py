"""The parts of `benchmarks/same_bits.py`, which compares two commits bit for bit.

No module here imports Equipoise. They use the command line and the files of run folders alone. The comparison
therefore outlives every move and new name inside the package.
"""
