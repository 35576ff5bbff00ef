/* What the files of convolutions share. */
#ifndef EVENSTEP_CONVOLUTIONS_H
#define EVENSTEP_CONVOLUTIONS_H

#include "products.h"

/* One of three dimensions; Python fills these in (`kernels/convolutions.py`). */
struct axis {
  long taps, dilation, stride, padding, source, out; /* kernel size; sizes of the source and out */
  long source_stride, out_stride, weight_stride;     /* in memory */
  /* Each source is copied to planes, in which neighbours lie `stride` apart in the source: element i
     of plane p is i * step + p - low of the source, or zero outside of it. */
  long phases, planes, pitch, step, low;
};

struct convolution {
  long examples, groups, inputs, outputs; /* channels of each group */
  long is_transposed;
  long is_in_place;                       /* read the source without a copy */
  long is_depthwise;                      /* one input and output channel for each group */
  long block;                             /* how many examples to compute at a time */
  long source_example, source_channel, out_example, out_channel; /* strides in memory */
  long weight_group, weight_output, weight_input;
  struct axis axis[3];
};

/* Where the source is read, in place or copied: strides. */
struct place {
  const float *at;
  long example, channel, grid[3], plane[3], index[3];
};

/* The tables of a phase, as in `struct product`. */
struct tables {
  long taps, depth, columns;
  long *weight_row, *out_row;          /* by output channel */
  long *weight_depth, *source_depth;   /* by (input channel, kernel position) */
  long *source_column, *out_column;    /* by (example, output position) */
};

INLINE long up(long a, long b) { return a <= 0 ? 0 : (a + b - 1) / b; }

/* How many outputs a phase has along an axis. */
INLINE long grid_size(const struct axis *axis, long phase) {
  return up(axis->out - phase, axis->phases);
}

/* Copy one channel of one example. */
void copy_channel(const struct convolution *g, const float *from, float *to);

/* Where a copy is read. */
struct place copied(const struct convolution *g, const float *copy);

/* Fill the tables by (input channel, kernel position) of a phase. */
void fill_depth(const struct convolution *g, const struct place *place, const long *phase,
                struct tables *t);

/* A convolution, and the gradient of its weights, of one channel for each group. */
void convolve_channels(const struct convolution *g, struct tables *t, const long *phase,
                       const float *source, const float *weights, const float *bias, float *out,
                       float *memory);
void channels_for_weights(const struct convolution *g, struct tables *t, const float *source,
                          const float *of_out, float *weights, float *memory);

#endif
