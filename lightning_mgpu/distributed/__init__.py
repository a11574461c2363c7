"""Building blocks of the strategies: sharding, processes and communication."""
