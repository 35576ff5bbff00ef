/* The gradients of several shards, added up in the canonical tree. */
#include "portable.h"

#define CHUNK 2048 /* numbers of a shard that are added up at a time */

/* For each array of `shards` blocks of `size` numbers: the first block gets the sum of all. Neighbours
   are added level by level; a last one without a neighbour goes on to the next level. */
PORTABLE void add_blocks(long arrays, long shards, float *const *blocks, const long *sizes) {
  for (long a = 0; a < arrays; a++)
    for (long from = 0; from < sizes[a]; from += CHUNK) {
      long count = smaller(CHUNK, sizes[a] - from);
      float *first = blocks[a] + from;
      for (long step = 1; step < shards; step *= 2)
        for (long shard = 0; shard + step < shards; shard += 2 * step) {
          float *left = first + shard * sizes[a];
          const float *right = left + step * sizes[a];
          for (long i = 0; i < count; i++) left[i] += right[i];
        }
    }
}
