"""Global batches, cut by the indices of their samples.

A *global batch* is one step's samples under any strategy. It is cut into k *shards*, one for each
replica, by the indices of its samples, before anything is read (`cut_indices`, in reader.py).
`ShardSampler` goes through the order that the user's sampler draws and yields a process's part of
every batch as `ShardIndices` (loader.py). `ShardReader` stands in the dataset's place, reads the
shards of such keys and collates each by itself (reader.py). `ShardLoader` stands in the loader's
place: it hands batches to Lightning, with checksums that processes compare (loader.py,
checksum.py). A loader that does not tell its indices is read whole by every process, and its
batches are cut (split_batch.py).
"""
