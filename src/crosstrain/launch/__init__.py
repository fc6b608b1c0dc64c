"""How the ranks of a run are started: argv and environment per rank, nothing else. One file per launcher."""
