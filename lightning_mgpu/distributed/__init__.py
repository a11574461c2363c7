"""What strategies build on: sharding, processes, and communication."""
