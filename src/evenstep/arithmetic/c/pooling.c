/* Means of boxes, and interpolation: an axis is described by a table, which Python makes. */
#include "portable.h"

/* Axes of a pooled volume. For each axis: how many numbers there are before, how many boxes, and for
   each box the first number and the one behind the last: begin[0], end[0], begin[1], ... */
typedef struct {
  long depth, height, width, boxes_d, boxes_h, boxes_w;
  const int64_t *d, *h, *w;
} Boxes;

static Boxes boxes_of(const int64_t *shape, const int64_t *edges) {
  return (Boxes){shape[0], shape[1], shape[2], shape[3], shape[4], shape[5],
                 edges, edges + 2 * shape[3], edges + 2 * (shape[3] + shape[4])};
}

/* The means of a row of boxes. sum = 0 + the rows of the planes of one box, in order; then its columns
   are added from left to right. */
static void means_of_columns(Boxes b, long d, long h, const float *divisor, const float *in,
                             float *restrict out, float *restrict sum) {
  for (long x = 0; x < b.width; x++) sum[x] = 0;
  for (long z = b.d[2 * d]; z < b.d[2 * d + 1]; z++)
    for (long y = b.h[2 * h]; y < b.h[2 * h + 1]; y++) {
      const float *row = in + (z * b.height + y) * b.width;
      for (long x = 0; x < b.width; x++) sum[x] += row[x];
    }
  for (long w = 0; w < b.boxes_w; w++) {
    float total = 0;
    for (long x = b.w[2 * w]; x < b.w[2 * w + 1]; x++) total += sum[x];
    out[w] = total / divisor[w];
  }
}

enum { LANES = 16 };
typedef float Lanes __attribute__((vector_size(4 * LANES)));

/* The means of one box for `count` channels, at most LANES, which lie side by side. */
INLINE void mean_of_channels(Boxes b, long d, long h, long w, long channels, long count,
                             float divisor, const float *in, float *out) {
  Lanes total = {0}, from = {0};
  for (long x = b.w[2 * w]; x < b.w[2 * w + 1]; x++) {
    Lanes column = {0};
    for (long z = b.d[2 * d]; z < b.d[2 * d + 1]; z++) {
      const float *row = in + ((z * b.height + b.h[2 * h]) * b.width + x) * channels;
      for (long y = b.h[2 * h]; y < b.h[2 * h + 1]; y++, row += b.width * channels) {
        memcpy(&from, row, (size_t)count * sizeof *row);
        column += from;
      }
    }
    total += column;
  }
  total /= divisor;
  memcpy(out, &total, (size_t)count * sizeof *out);
}

static void means_of_channels(Boxes b, long d, long h, long w, long channels, float divisor,
                              const float *in, float *out) {
  for (long c = 0; c < channels; c += LANES)
    if (channels - c >= LANES) mean_of_channels(b, d, h, w, channels, LANES, divisor, in + c, out + c);
    else mean_of_channels(b, d, h, w, channels, channels - c, divisor, in + c, out + c);
}

/* Means of boxes of [planes, depth, height, width, channels]: the sum of a box goes over its depth
   and height for each column first, then over the columns from left to right, and is divided by
   `divisors` (one for each box of a volume). `sum`: `width` floats. */
PORTABLE void box_means(long planes, long channels, const int64_t *shape, const int64_t *edges,
                        const float *divisors, const float *in, float *out, float *sum) {
  Boxes b = boxes_of(shape, edges);
  for (long p = 0; p < planes; p++, in += b.depth * b.height * b.width * channels) {
    const float *divisor = divisors;
    for (long d = 0; d < b.boxes_d; d++)
      for (long h = 0; h < b.boxes_h; h++) {
        if (channels == 1) means_of_columns(b, d, h, divisor, in, out, sum);
        else
          for (long w = 0; w < b.boxes_w; w++)
            means_of_channels(b, d, h, w, channels, divisor[w], in, out + w * channels);
        divisor += b.boxes_w;
        out += b.boxes_w * channels;
      }
  }
}

/* The gradient of `in`: each box gives grad / divisor to its numbers. For each row of boxes, sums
   along the row go over the boxes from left to right; these rows of sums are added in order. `in`
   must be 0; `spread`: width * channels floats. */
PORTABLE void box_gradients(long planes, long channels, const int64_t *shape, const int64_t *edges,
                            const float *divisors, const float *grad, float *in, float *spread) {
  Boxes b = boxes_of(shape, edges);
  long length = b.width * channels;
  for (long p = 0; p < planes; p++, in += b.depth * b.height * length) {
    const float *divisor = divisors;
    for (long d = 0; d < b.boxes_d; d++)
      for (long h = 0; h < b.boxes_h; h++) {
        for (long i = 0; i < length; i++) spread[i] = 0;
        for (long w = 0; w < b.boxes_w; w++, divisor++, grad += channels) {
          long begin = b.w[2 * w], end = b.w[2 * w + 1];
          if (channels == 1) {
            float share = *grad / *divisor;
            for (long x = begin; x < end; x++) spread[x] += share;
            continue;
          }
          for (long x = begin; x < end; x++)
            for (long c = 0; c < channels; c++) spread[x * channels + c] += grad[c] / *divisor;
        }
        for (long z = b.d[2 * d]; z < b.d[2 * d + 1]; z++)
          for (long y = b.h[2 * h]; y < b.h[2 * h + 1]; y++) {
            float *row = in + (z * b.height + y) * length;
            for (long i = 0; i < length; i++) row[i] += spread[i];
          }
      }
  }
}

/* Interpolation along one axis of [outer, before, inner] to [outer, after, inner]:
   out[j] = weight[j][0] * in[at[j][0]], plus weight[j][t] * in[at[j][t]] for t = 1, 2, ..., each by
   one fused multiply-add. `at` and `weight` have `taps` numbers for each j. */
PORTABLE void interpolated(long outer, long before, long after, long inner, long taps,
                           const int64_t *at, const float *weight, const float *in, float *out) {
  for (long o = 0; o < outer; o++, in += before * inner)
    for (long j = 0; j < after; j++, out += inner)
      for (long t = 0; t < taps; t++) {
        const float *row = in + at[j * taps + t] * inner;
        float by = weight[j * taps + t];
        if (t == 0)
          for (long i = 0; i < inner; i++) out[i] = by * row[i];
        else
          for (long i = 0; i < inner; i++) out[i] = fma32(by, row[i], out[i]);
      }
}

/* The gradient of `in`: in[at[j][t]] += weight[j][t] * grad[j], by fused multiply-adds, for j = 0, 1,
   ..., and t = 0, 1, ... for each j. `in` must be 0. */
PORTABLE void interpolated_gradients(long outer, long before, long after, long inner, long taps,
                                     const int64_t *at, const float *weight, const float *grad,
                                     float *in) {
  for (long o = 0; o < outer; o++, in += before * inner)
    for (long j = 0; j < after; j++, grad += inner)
      for (long t = 0; t < taps; t++) {
        float *row = in + at[j * taps + t] * inner, by = weight[j * taps + t];
        for (long i = 0; i < inner; i++) row[i] = fma32(by, grad[i], row[i]);
      }
}
