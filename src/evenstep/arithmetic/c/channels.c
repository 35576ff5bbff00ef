/* Convolutions where every group has one channel, which need no products of matrices. */
#include "convolutions.h"
#include "sums.h"

#define SUMS LANES
#define CHUNK (4 * SUMS) /* outputs that are computed at a time */

/* Without the pragmas, the compiler makes vectors of the wrong loops. */
#define EACH_OF_SUMS(...)                                                                         \
  _Pragma("GCC unroll 1") for (int i = 0; i < SUMS; i++) { __VA_ARGS__; }
#define EACH_OF_CHUNK(...)                                                                        \
  _Pragma("GCC unroll 4") for (int part = 0; part < CHUNK; part += SUMS) {                        \
    EACH_OF_SUMS(__VA_ARGS__)                                                                     \
  }

/* to[i] = the chain over taps of fma(weight, from[i + place of the tap], sum), for a chunk */
INLINE void chain(const struct tables *t, const float *restrict from,
                  const float *restrict weights, float *restrict to) {
  float sum[CHUNK];
  EACH_OF_CHUNK(sum[part + i] = 0)
  for (long k = 0; k < t->taps; k++) {
    float weight = weights[t->weight_depth[k]];
    const float *x = from + t->source_depth[k];
    EACH_OF_CHUNK(sum[part + i] = fma32(weight, x[part + i], sum[part + i]))
  }
  EACH_OF_CHUNK(to[part + i] = sum[part + i])
}

/* to = from + bias, if there is one */
INLINE void write_row(long count, const float *restrict from, const float *bias,
                      float *restrict to, long stride) {
  if (!bias && stride == 1)
    copy_floats(count, from, to);
  else if (!bias)
    for (long i = 0; i < count; i++) to[i * stride] = from[i];
  else if (stride == 1)
    for (long i = 0; i < count; i++) to[i] = from[i] + *bias;
  else
    for (long i = 0; i < count; i++) to[i * stride] = from[i] + *bias;
}

/* Write the outputs of a phase of one channel; `sums` has those between the rows of the copy, too. */
static void write_outputs(const struct convolution *g, const struct place *place,
                          const long *phase, const float *sums, const float *bias, float *out) {
  const struct axis *z = g->axis, *y = z + 1, *x = z + 2;
  long step = x->phases * x->out_stride;
  for (long i = 0; i < grid_size(z, phase[0]); i++)
    for (long j = 0; j < grid_size(y, phase[1]); j++) {
      const float *from = sums + i * place->grid[0] + j * place->grid[1];
      float *to = out + (phase[0] + i * z->phases) * z->out_stride +
                  (phase[1] + j * y->phases) * y->out_stride + phase[2] * x->out_stride;
      write_row(grid_size(x, phase[2]), from, bias, to, step);
    }
}

void convolve_channels(const struct convolution *g, struct tables *t, const long *phase,
                       const float *source, const float *weights, const float *bias, float *out,
                       float *memory) {
  struct place place = copied(g, memory);
  float *copy = memory, *sums = memory + place.channel + CHUNK;
  long count = 1;
  for (int d = 0; d < 3; d++) count += (grid_size(g->axis + d, phase[d]) - 1) * place.grid[d];
  fill_depth(g, &place, phase, t);
  for (long e = 0; e < g->examples; e++)
    for (long c = 0; c < g->groups; c++) {
      copy_channel(g, source + e * g->source_example + c * g->source_channel, copy);
      for (long i = 0; i < count; i += CHUNK)
        chain(t, copy + i, weights + c * g->weight_group, sums + i);
      write_outputs(g, &place, phase, sums, bias ? bias + c : 0,
                    out + e * g->out_example + c * g->out_channel);
    }
}

/* sums[k][x mod 16] += of_out[x] * what lies under it for tap k, for x of one row */
static void add_row(const struct tables *t, long width, const float *of_out, long stride,
                    const float *restrict from, float *restrict sums) {
  for (long at = 0; at < width; at += SUMS) {
    int n = smaller(SUMS, width - at);
    float row[SUMS] = {0};
    for (int i = 0; i < n; i++) row[i] = of_out[(at + i) * stride];
    for (long k = 0; k < t->taps; k++) {
      const float *x = from + at + t->source_depth[k];
      float *sum = sums + k * SUMS;
      if (n == SUMS)
        EACH_OF_SUMS(sum[i] = fma32(row[i], x[i], sum[i]))
      else
        EACH_OF_SUMS(sum[i] = i < n ? fma32(row[i], x[i], sum[i]) : sum[i])
    }
  }
}

/* The gradient of the weights where each group has one channel: of each weight, 16 chains take the
   output positions x with x mod 16 = 0, 1, ..., over (example, z, y, x), and are added as
   lanes are (sums.h). */
void channels_for_weights(const struct convolution *g, struct tables *t, const float *source,
                          const float *of_out, float *weights, float *memory) {
  static const long phase[3] = {0, 0, 0};
  struct place place = copied(g, memory);
  const struct axis *z = g->axis, *y = z + 1, *x = z + 2;
  float *copy = memory;
  float *sums = memory + place.channel + CHUNK;
  fill_depth(g, &place, phase, t);
  for (long c = 0; c < g->groups; c++) {
    memset(sums, 0, t->taps * SUMS * sizeof(float));
    for (long e = 0; e < g->examples; e++) {
      copy_channel(g, source + e * g->source_example + c * g->source_channel, copy);
      const float *from = of_out + e * g->out_example + c * g->out_channel;
      for (long i = 0; i < z->out; i++)
        for (long j = 0; j < y->out; j++)
          add_row(t, x->out, from + i * z->out_stride + j * y->out_stride, x->out_stride,
                  copy + i * place.grid[0] + j * place.grid[1], sums);
    }
    for (long k = 0; k < t->taps; k++) {
      double lanes[LANES];
      for (int i = 0; i < LANES; i++) lanes[i] = sums[k * SUMS + i];
      weights[c * g->weight_group + t->weight_depth[k]] = (float)sum_of(lanes);
    }
  }
}
