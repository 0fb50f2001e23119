"""The samples of a data set, on the ranks of a world: the way of one sample from file to device.

1. `loader`: `DataLoader`, the public class, checks its arguments; `position` tracks which epoch is next and which
   samples an optimizer has used. `sampler` has the samplers for torch's own loader.
2. `order/`: which samples this rank loads in which step, computed from seed, epoch and position (`permutation`,
   `weighted`) or drawn by a sampler (`drawn`), cut into global batches (`batch_plan`) and into a `Request` per step.
3. `sources/`: where the samples are. A `Source` turns requests into batches: `samples` for data sets that number them
   (`tokens` reads them from mapped files), `streams` for iterable ones.
4. `loading/`: `fetch` makes one batch of one request, here or in one of the processes of `workers`;
   `device_prefetch` copies it to the device while the batch before is in use.

Imports point down in the order loader, sampler, `sources`, `loading`, `order`, `position`.
"""
