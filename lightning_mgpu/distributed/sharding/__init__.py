"""Global batches, cut by the indices of their samples.

A *global batch* contains the samples of one step, under any strategy. It is cut into k *shards*,
one per replica, by the indices of its samples, before anything is read (`cut_indices` in
reader.py). `ShardSampler` wraps the user's sampler and yields a process's part of every batch as
`ShardIndices` (loader.py). `ShardReader` wraps the dataset: it reads and collates only the shards
with these indices (reader.py). `ShardLoader` wraps the loader: it yields batches to Lightning, with
checksums that processes compare (loader.py, checksum.py). If the indices of a loader are unknown,
every process reads all its batches and splits them (split_batch.py).
"""
