/* Convolutions, as products of the weights and of what lies under them.

   An element of a convolution is c(i, j) of a product: i is an output channel, j an output position
   (of an example), and the depth runs over (input channel of the group, kernel position). Input
   that lies in the padding is zero, and multiplied like any other. For the gradient of the weights,
   j and the depth change places. Where an element of the input lies is a sum of what depends on j
   and what depends on the depth, so `multiply` reads it in place: no matrix of columns is written.

   The same code computes a convolution's gradient for its input, which is what a transposed
   convolution computes (`is_transposed`): with stride s, the outputs at r, r + s, r + 2s... are a
   convolution with stride 1 of those kernel positions that meet them, for each phase r. */
#include "products.h"
#include "sums.h"

/* One of three dimensions; Python fills these in (`sums/convolutions.py`). */
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

static const long only_phase[3] = {0, 0, 0}; /* where there is one */

INLINE long up(long a, long b) { return a <= 0 ? 0 : (a + b - 1) / b; }

/* How many outputs a phase has along an axis. */
INLINE long grid_size(const struct axis *axis, long phase) {
  return up(axis->out - phase, axis->phases);
}

/* The source, copied */

static void copy_row(const struct axis *axis, long plane, const float *from, float *to) {
  long begin = axis->pitch, end = begin;
  if (from) {
    begin = smaller(axis->pitch, up(axis->low - plane, axis->step));
    end = larger(begin, smaller(axis->pitch, up(axis->source + axis->low - plane, axis->step)));
    from += (begin * axis->step + plane - axis->low) * axis->source_stride;
  }
  long stride = axis->step * axis->source_stride;
  for (long i = 0; i < begin; i++) to[i] = 0;
  if (stride == 1) copy_floats(end - begin, from, to + begin);
  else
    for (long i = begin; i < end; i++) to[i] = from[(i - begin) * stride];
  for (long i = end; i < axis->pitch; i++) to[i] = 0;
}

/* Where index i of a plane lies in the source, in elements; -1 outside. */
INLINE long outer_place(const struct axis *axis, long plane, long i) {
  long at = i * axis->step + plane - axis->low;
  return at < 0 || at >= axis->source ? -1 : at * axis->source_stride;
}

/* Copy one channel of one example. */
static void copy_channel(const struct convolution *g, const float *from, float *to) {
  const struct axis *z = g->axis, *y = z + 1, *x = z + 2;
  for (long planes = 0; planes < z->planes * y->planes * x->planes; planes++) {
    long px = planes % x->planes, py = planes / x->planes % y->planes;
    long pz = planes / x->planes / y->planes;
    for (long i = 0; i < z->pitch; i++)
      for (long j = 0; j < y->pitch; j++, to += x->pitch) {
        long at_z = outer_place(z, pz, i), at_y = outer_place(y, py, j);
        copy_row(x, px, at_z < 0 || at_y < 0 ? 0 : from + at_z + at_y, to);
      }
  }
}

/* Where a copy is read. */
static struct place copied(const struct convolution *g, const float *copy) {
  struct place place = {copy, 0, 0, {0}, {0}, {0}};
  long size = 1;
  for (int d = 2; d >= 0; d--) place.index[d] = place.grid[d] = size, size *= g->axis[d].pitch;
  for (int d = 2; d >= 0; d--) place.plane[d] = size, size *= g->axis[d].planes;
  place.channel = size;
  place.example = size * g->groups * g->inputs;
  return place;
}

/* Where a block of examples is read: in place, or copied to `copy` first. */
static struct place place_of(const struct convolution *g, long examples, const float *source,
                             float *copy) {
  struct place place = copied(g, copy);
  if (g->is_in_place) {
    place = (struct place){source, g->source_example, g->source_channel, {0}, {0}, {0}};
    for (int d = 0; d < 3; d++) {
      place.index[d] = g->axis[d].source_stride;
      place.grid[d] = g->axis[d].step * g->axis[d].source_stride;
    }
    return place;
  }
  for (long e = 0; e < examples; e++)
    for (long c = 0; c < g->groups * g->inputs; c++)
      copy_channel(g, source + e * g->source_example + c * g->source_channel,
                   copy + e * place.example + c * place.channel);
  return place;
}

/* Tables */

/* How far from an output's own place the source of a kernel position lies, in elements; -1 if it
   doesn't meet the outputs of the phase. */
static long reach(const struct convolution *g, const struct place *place, int d, long phase,
                  long tap) {
  const struct axis *axis = &g->axis[d];
  if (g->is_transposed) {
    long at = phase + axis->padding - tap * axis->dilation;
    if (at % axis->stride) return -1;
    return (at / axis->stride + axis->low) * place->index[d];
  }
  long at = tap * axis->dilation;
  if (g->is_in_place) return at * place->index[d];
  return at % axis->stride * place->plane[d] + at / axis->stride * place->index[d];
}

/* Fill the tables by (input channel, kernel position) of a phase. */
static void fill_depth(const struct convolution *g, const struct place *place, const long *phase,
                       struct tables *t) {
  const struct axis *z = g->axis, *y = z + 1, *x = z + 2;
  t->taps = 0;
  for (long i = 0; i < z->taps; i++)
    for (long j = 0; j < y->taps; j++)
      for (long k = 0; k < x->taps; k++) {
        long at_z = reach(g, place, 0, phase[0], i), at_y = reach(g, place, 1, phase[1], j);
        long at_x = reach(g, place, 2, phase[2], k);
        if (at_z < 0 || at_y < 0 || at_x < 0) continue;
        t->source_depth[t->taps] = at_z + at_y + at_x;
        t->weight_depth[t->taps++] =
            i * z->weight_stride + j * y->weight_stride + k * x->weight_stride;
      }
  t->depth = g->inputs * t->taps;
  for (long c = 1; c < g->inputs; c++)
    for (long i = 0; i < t->taps; i++) {
      t->source_depth[c * t->taps + i] = t->source_depth[i] + c * place->channel;
      t->weight_depth[c * t->taps + i] = t->weight_depth[i] + c * g->weight_input;
    }
}

/* `between`: have columns between the rows, too, so that more of them lie one behind the other. */
static void fill_columns(const struct convolution *g, const struct place *place,
                         const long *phase, long examples, int between, struct tables *t) {
  const struct axis *z = g->axis, *y = z + 1, *x = z + 2;
  long depth = grid_size(z, phase[0]), height = grid_size(y, phase[1]);
  long width = grid_size(x, phase[2]), n = 0;
  for (long e = 0; e < examples; e++)
    for (long i = 0; i < depth; i++)
      for (long j = 0; j < height; j++) {
        long source = e * place->example + i * place->grid[0] + j * place->grid[1];
        long out = e * g->out_example + (phase[0] + i * z->phases) * z->out_stride +
                   (phase[1] + j * y->phases) * y->out_stride + phase[2] * x->out_stride;
        long end = between && j + 1 < height ? place->grid[1] : width;
        for (long k = 0; k < end; k++, n++) {
          t->source_column[n] = source + k * place->grid[2];
          t->out_column[n] = k < width ? out + k * x->phases * x->out_stride : NOWHERE;
        }
      }
  t->columns = n;
}

/* Whether it is faster to compute the columns between the rows than to copy those of the rows. */
static int has_gaps(const struct convolution *g, const struct place *place, const long *phase) {
  long width = grid_size(g->axis + 2, phase[2]);
  return place->grid[2] == 1 && g->outputs <= FEW_ROWS && place->grid[1] * 3 <= width * 4;
}

/* Divide the memory of the tables. Returns the memory behind them. */
static float *divide(const struct convolution *g, float *memory, struct tables *t) {
  long taps = 1, positions = 1;
  for (int d = 0; d < 3; d++)
    taps *= g->axis[d].taps, positions *= larger(g->axis[d].out, d < 2 ? 0 : g->axis[d].pitch);
  long *table = (long *)memory;
  t->weight_row = table, table = (long *)strided(g->outputs, g->weight_output, table);
  t->out_row = table, table = (long *)strided(g->outputs, g->out_channel, table);
  t->weight_depth = table, table += g->inputs * taps;
  t->source_depth = table, table += g->inputs * taps;
  t->source_column = table, table += g->block * positions;
  t->out_column = table, table += g->block * positions;
  return (float *)table;
}

/* Where every group has one channel, no products of matrices are needed. */

#define CHUNK (4 * LANES) /* outputs that are computed at a time */

/* Without the pragmas, the compiler makes vectors of the wrong loops. */
#define EACH_OF_SUMS(...)                                                                         \
  _Pragma("GCC unroll 1") for (int i = 0; i < LANES; i++) { __VA_ARGS__; }
#define EACH_OF_CHUNK(...)                                                                        \
  _Pragma("GCC unroll 4") for (int part = 0; part < CHUNK; part += LANES) {                        \
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

/* Write the outputs of a phase of one channel; `sums` has those between the rows of the copy, too. */
static void write_outputs(const struct convolution *g, const struct place *place,
                          const long *phase, const float *sums, const float *bias, float *out) {
  const struct axis *z = g->axis, *y = z + 1, *x = z + 2;
  long step = x->phases * x->out_stride, width = grid_size(x, phase[2]);
  for (long i = 0; i < grid_size(z, phase[0]); i++)
    for (long j = 0; j < grid_size(y, phase[1]); j++) {
      const float *restrict from = sums + i * place->grid[0] + j * place->grid[1];
      float *restrict to = out + (phase[0] + i * z->phases) * z->out_stride +
                  (phase[1] + j * y->phases) * y->out_stride + phase[2] * x->out_stride;
      if (!bias && step == 1) copy_floats(width, from, to);
      else
        for (long k = 0; k < width; k++) to[k * step] = bias ? from[k] + *bias : from[k];
    }
}

static void convolve_channels(const struct convolution *g, struct tables *t, const long *phase,
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
  for (long at = 0; at < width; at += LANES) {
    int n = smaller(LANES, width - at);
    float row[LANES] = {0};
    for (int i = 0; i < n; i++) row[i] = of_out[(at + i) * stride];
    for (long k = 0; k < t->taps; k++) {
      const float *x = from + at + t->source_depth[k];
      float *sum = sums + k * LANES;
      if (n == LANES) EACH_OF_SUMS(sum[i] = fma32(row[i], x[i], sum[i]))
      else EACH_OF_SUMS(sum[i] = i < n ? fma32(row[i], x[i], sum[i]) : sum[i])
    }
  }
}

/* The gradient of the weights where each group has one channel: of each weight, 16 chains take the
   output positions x with x mod 16 = 0, 1, ..., over (example, z, y, x), and are added as
   lanes are (sums.h). */
static void channels_for_weights(const struct convolution *g, struct tables *t, const float *source,
                          const float *of_out, float *weights, float *memory) {
  struct place place = copied(g, memory);
  const struct axis *z = g->axis, *y = z + 1, *x = z + 2;
  float *copy = memory, *sums = memory + place.channel + CHUNK;
  fill_depth(g, &place, only_phase, t);
  for (long c = 0; c < g->groups; c++) {
    memset(sums, 0, t->taps * LANES * sizeof(float));
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
      for (int i = 0; i < LANES; i++) lanes[i] = sums[k * LANES + i];
      weights[c * g->weight_group + t->weight_depth[k]] = (float)sum_of(lanes);
    }
  }
}

/* The convolution and its gradients */

static void convolve_phase(const struct convolution *g, const struct place *place,
                           const struct tables *t, const float *weights, const float *bias,
                           float *out, float *scratch) {
  struct product p = {.rows = g->outputs, .columns = t->columns, .depth = t->depth,
                      .a_row = t->weight_row, .a_depth = t->weight_depth,
                      .b_depth = t->source_depth, .b_column = t->source_column,
                      .c_row = t->out_row, .c_column = t->out_column,
                      .alpha = 1, .beta = 1, .addend_row = 1};
  for (long group = 0; group < g->groups; group++) {
    p.a = weights + group * g->weight_group;
    p.b = place->at + group * g->inputs * place->channel;
    p.c = out + group * g->outputs * g->out_channel;
    p.addend = bias ? bias + group * g->outputs : 0;
    multiply(&p, scratch);
  }
}

#define EACH_PHASE(g, ...)                                                                        \
  for (long count = g->axis[0].phases * g->axis[1].phases * g->axis[2].phases, at = 0;            \
       at < count; at++) {                                                                        \
    long by_x = g->axis[2].phases, by_y = g->axis[1].phases;                                      \
    long phase[3] = {at / by_x / by_y, at / by_x % by_y, at % by_x};                              \
    __VA_ARGS__;                                                                                  \
  }

/* out = the convolution + bias (null for none). `scratch` has MULTIPLY_SCRATCH floats, and as many
   as `divide` and the copy of a block of examples need. */
PORTABLE void convolve(const struct convolution *g, const float *source, const float *weights,
                       const float *bias, float *out, float *scratch) {
  struct tables t;
  float *copy = divide(g, scratch + MULTIPLY_SCRATCH, &t);
  if (g->is_depthwise) {
    EACH_PHASE(g, convolve_channels(g, &t, phase, source, weights, bias, out, copy))
    return;
  }
  for (long e = 0; e < g->examples; e += g->block) {
    long examples = smaller(g->block, g->examples - e);
    struct place place = place_of(g, examples, source + e * g->source_example, copy);
    EACH_PHASE(g, {
      fill_depth(g, &place, phase, &t);
      fill_columns(g, &place, phase, examples, has_gaps(g, &place, phase), &t);
      prepare(t.depth, scratch);
      convolve_phase(g, &place, &t, weights, bias, out + e * g->out_example, scratch);
    })
  }
}

/* The gradient of the weights: for each of them, one chain over (example, output position). */
PORTABLE void convolve_for_weights(const struct convolution *g, const float *source,
                                   const float *of_out, float *weights, float *scratch) {
  struct tables t;
  float *copy = divide(g, scratch + MULTIPLY_SCRATCH, &t);
  if (g->is_depthwise) {
    channels_for_weights(g, &t, source, of_out, weights, copy);
    return;
  }
  struct product p = {.rows = g->outputs, .alpha = 1,
                      .a_row = t.out_row, .a_depth = t.out_column,
                      .b_depth = t.source_column, .b_column = t.source_depth,
                      .c_row = t.weight_row, .c_column = t.weight_depth};
  for (long e = 0; e < g->examples; e += g->block) {
    long examples = smaller(g->block, g->examples - e);
    struct place place = place_of(g, examples, source + e * g->source_example, copy);
    if (!e) fill_depth(g, &place, only_phase, &t);
    fill_columns(g, &place, only_phase, examples, 0, &t);
    p.columns = t.depth, p.depth = t.columns, p.is_begun = e > 0;
    prepare(p.depth, scratch);
    for (long group = 0; group < g->groups; group++) {
      p.a = of_out + e * g->out_example + group * g->outputs * g->out_channel;
      p.b = place.at + group * g->inputs * place.channel;
      p.c = weights + group * g->weight_group;
      multiply(&p, scratch);
    }
  }
}
