"""``python -m benchmarks.peers``: measure every peer and print the table."""

from benchmarks.peers import main

main()
