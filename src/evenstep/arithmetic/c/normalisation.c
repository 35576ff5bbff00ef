/* Batch, layer and group normalisation. Sums are those of sums.h; a variance is the mean of squared
   deviations from the mean in double, and 1 / sqrt(variance + eps) is rounded once.

   Channels: an array has `batch * channels * length` elements; length 1 is also how memory that is
   channels-last is given (then the batch is that of all places). */
#include "sums.h"

INLINE double inverse_root(double variance, double eps) {
  return 1 / __builtin_sqrt(variance + eps);
}

/* out[i] = expression, of an element i and its channel c, for `width` channels of each example; those
   of the next example lie `step` on. */
#define EACH_IN_CHANNELS(expression)                                                     \
  for (long at = 0; at < batch * step; at += step)                                       \
    if (length == 1)                                                                     \
      for (long c = 0; c < width; c++) { long i = at + c; out[i] = (expression); }       \
    else                                                                                 \
      for (long c = 0; c < width; c++)                                                   \
        for (long i = at + c * length, end = i + length; i < end; i++) out[i] = (expression);

/* out = (x - mean) * (invstd * weight) + bias, for up to TILE channels from `from` on */
INLINE void normalise(long batch, long length, long width, long step, long from, const float *x,
                      const float *restrict mean, const float *invstd, const float *weight,
                      const float *bias, float *restrict out) {
  float scale[TILE], shift[TILE];
  x += from * length, out += from * length, mean += from;
  for (long i = 0; i < width; i++) {
    scale[i] = weight ? invstd[from + i] * weight[from + i] : invstd[from + i];
    shift[i] = bias ? bias[from + i] : 0.0f;
  }
  EACH_IN_CHANNELS((x[i] - mean[c]) * scale[c] + shift[c])
}

INLINE float moved(double momentum, double value, float *running) {
  return (float)(momentum * value + (1 - momentum) * (double)*running);
}

/* Batch normalisation by the batch's own moments. The running ones, if any, get
   momentum * own + (1 - momentum) * running, in double; the variance is sum / (count - 1). */
PORTABLE void batch_norm(long batch, long channels, long length, const float *x,
                         const float *weight, const float *bias, float *running_mean,
                         float *running_var, double momentum, double eps, float *mean,
                         float *invstd, float *out) {
  long step = channels * length, tile = length == 1 ? TILE : 1;
  double count = (double)(batch * length);
  for (long from = 0; from < channels; from += tile) {
    long width = smaller(tile, channels - from);
    const float *in = x + from * length;
    double centres[TILE], sums[TILE];
    sum_channels(VALUES, batch, length, width, step, in, 0, 0, centres, 0);
    for (long i = 0; i < width; i++) centres[i] /= count;
    sum_channels(DEVIATIONS, batch, length, width, step, in, 0, centres, sums, 0);
    for (long i = 0; i < width; i++) {
      long c = from + i;
      mean[c] = (float)centres[i];
      invstd[c] = (float)inverse_root(sums[i] / count, eps);
      if (running_mean) running_mean[c] = moved(momentum, centres[i], running_mean + c);
      if (running_var) running_var[c] = moved(momentum, sums[i] / (count - 1), running_var + c);
    }
    normalise(batch, length, width, step, from, x, mean, invstd, weight, bias, out);
  }
}

/* Batch normalisation by given moments; `invstd` is an output. */
PORTABLE void batch_norm_fixed(long batch, long channels, long length, const float *x,
                               const float *weight, const float *bias, const float *mean,
                               const float *variance, double eps, float *invstd, float *out) {
  long step = channels * length;
  for (long c = 0; c < channels; c++) invstd[c] = (float)inverse_root((double)variance[c], eps);
  for (long from = 0; from < channels && out; from += TILE)
    normalise(batch, length, smaller(TILE, channels - from), step, from, x, mean, invstd, weight,
              bias, out);
}

INLINE void channel_gradient(long fixed, long batch, long length, long width, long step,
                             const float *g, const float *x, const float *restrict mean,
                             const float *restrict part, const float *restrict slope,
                             const float *restrict scale, float *restrict out) {
  if (fixed)
    EACH_IN_CHANNELS(g[i] * scale[c])
  else
    EACH_IN_CHANNELS(((g[i] - part[c]) - (x[i] - mean[c]) * slope[c]) * scale[c])
}

/* The gradients of the input, the weight and the bias: null where not wanted. With S1 the sum of g
   and S2 that of g * (x - mean): those of the bias S1, of the weight S2 * invstd, of the input
   ((g - S1 / count) - (x - mean) * (S2 / count * invstd²)) * (invstd * weight), or, where the
   moments are `fixed`, g * (invstd * weight). */
PORTABLE void batch_norm_gradient(long fixed, long batch, long channels, long length,
                                  const float *g, const float *x, const float *weight,
                                  const float *mean, const float *invstd, float *out,
                                  float *out_weight, float *out_bias) {
  long step = channels * length, tile = length == 1 ? TILE : 1;
  double count = (double)(batch * length);
  for (long from = 0; from < channels; from += tile) {
    long width = smaller(tile, channels - from), at = from * length;
    double centres[TILE], sums[TILE], products[TILE];
    float part[TILE], slope[TILE], scale[TILE];
    for (long i = 0; i < width; i++) centres[i] = (double)mean[from + i];
    sum_channels(PRODUCTS, batch, length, width, step, x + at, g + at, centres, products, sums);
    for (long i = 0; i < width; i++) {
      long c = from + i;
      double inverse = (double)invstd[c];
      if (out_bias) out_bias[c] = (float)sums[i];
      if (out_weight) out_weight[c] = (float)(products[i] * inverse);
      part[i] = fixed ? 0.0f : (float)(sums[i] / count);
      slope[i] = fixed ? 0.0f : (float)(products[i] / count * inverse * inverse);
      scale[i] = weight ? invstd[c] * weight[c] : invstd[c];
    }
    if (out)
      channel_gradient(fixed, batch, length, width, step, g + at, x + at, mean + from, part, slope,
                       scale, out + at);
  }
}

INLINE void row_moments(long n, const float *x, double eps, float *mean, float *invstd) {
  double centre = sum_row(VALUES, n, x, 0, 0, 0) / (double)n;
  double variance = sum_row(DEVIATIONS, n, x, 0, centre, 0) / (double)n;
  *mean = (float)centre;
  *invstd = (float)inverse_root(variance, eps);
}

/* out = ((x - mean) * invstd) * weight + bias, by the moments of each row */
PORTABLE void layer_norm(long rows, long n, const float *x, const float *weight, const float *bias,
                         double eps, float *mean, float *invstd, float *out) {
  for (long row = 0; row < rows; row++, x += n, out += n) {
    row_moments(n, x, eps, mean + row, invstd + row);
    float centre = mean[row], scale = invstd[row];
    for (long i = 0; i < n; i++) out[i] = (x[i] - centre) * scale * weight[i] + bias[i];
  }
}

/* The gradients: null where not wanted. With h = g * weight, of each row S1 the sum of h and S2 that
   of h * (x - mean), that of the input is ((h - S1 / n) - (x - mean) * (S2 / n * invstd²)) * invstd.
   Those of the weight and the bias are the sums over rows of g * ((x - mean) * invstd), in double,
   and of g. */
PORTABLE void layer_norm_gradient(long rows, long n, const float *g, const float *x,
                                  const float *weight, const float *mean, const float *invstd,
                                  float *out, float *out_weight, float *out_bias) {
  for (long row = 0; out && row < rows; row++, out += n) {
    const float *own = g + row * n, *in = x + row * n;
    for (long i = 0; i < n; i++) out[i] = own[i] * weight[i];
    float centre = mean[row], scale = invstd[row];
    double sum, products = sum_row(PRODUCTS, n, in, out, (double)centre, &sum);
    float part = (float)(sum / (double)n);
    float slope = (float)(products / (double)n * (double)scale * (double)scale);
    for (long i = 0; i < n; i++) out[i] = ((out[i] - part) - (in[i] - centre) * slope) * scale;
  }
  for (long from = 0; from < n && (out_weight || out_bias); from += TILE) {
    const Columns in = {.x = x + from, .y = g + from, .row_centres = mean, .row_scales = invstd};
    long width = smaller(TILE, n - from);
    double products[TILE], sums[TILE];
    sum_columns(SCALED, rows, width, n, in, products, sums);
    for (long i = 0; i < width; i++) {
      if (out_weight) out_weight[from + i] = (float)products[i];
      if (out_bias) out_bias[from + i] = (float)sums[i];
    }
  }
}

/* out = (x - mean) * (invstd * weight) + bias, by the moments of each group of `channels` */
PORTABLE void group_norm(long batch, long groups, long channels, long length, const float *x,
                         const float *weight, const float *bias, double eps, float *mean,
                         float *invstd, float *out) {
  for (long row = 0; row < batch * groups; row++) {
    row_moments(channels * length, x, eps, mean + row, invstd + row);
    float centre = mean[row], inverse = invstd[row];
    long from = row % groups * channels;
    for (long c = from; c < from + channels; c++, x += length, out += length) {
      float scale = weight ? inverse * weight[c] : inverse, shift = bias ? bias[c] : 0.0f;
      for (long i = 0; i < length; i++) out[i] = (x[i] - centre) * scale + shift;
    }
  }
}

/* The gradients: null where not wanted. With S1 and S2 the sums of g and of g * (x - mean) over each
   channel of an example, and T1 and T2 those of weight * S1 and weight * S2 over the group (in
   double, ascending), that of the input is
   ((g * weight - T1 / n) - (x - mean) * (T2 / n * invstd²)) * invstd. Those of the bias and of the
   weight are the sums over examples (in double, ascending) of S1 and of S2 * invstd. `scratch` has
   room for two doubles for each channel. */
PORTABLE void group_norm_gradient(long batch, long groups, long channels, long length,
                                  const float *g, const float *x, const float *weight,
                                  const float *mean, const float *invstd, float *out,
                                  float *out_weight, float *out_bias, double *scratch) {
  long all = groups * channels;
  double *weights = scratch, *biases = scratch + all, n = (double)(channels * length);
  for (long c = 0; c < 2 * all; c++) scratch[c] = 0;
  for (long row = 0; row < batch * groups; row++) {
    float centre = mean[row], scale = invstd[row];
    double inverse = (double)scale, sum = 0, product = 0;
    const float *own = weight ? weight + row % groups * channels : 0;
    for (long c = 0; c < channels; c++) {
      long at = (row * channels + c) * length, of = row % groups * channels + c;
      double s1, s2 = sum_row(PRODUCTS, length, x + at, g + at, (double)centre, &s1);
      biases[of] += s1;
      weights[of] += s2 * inverse;
      sum += own ? (double)own[c] * s1 : s1;
      product += own ? (double)own[c] * s2 : s2;
    }
    float part = (float)(sum / n), slope = (float)(product / n * inverse * inverse);
    for (long c = 0; out && c < channels; c++) {
      float factor = own ? own[c] : 1.0f;
      for (long i = (row * channels + c) * length, end = i + length; i < end; i++)
        out[i] = ((g[i] * factor - part) - (x[i] - centre) * slope) * scale;
    }
  }
  for (long c = 0; c < all; c++) {
    if (out_weight) out_weight[c] = (float)weights[c];
    if (out_bias) out_bias[c] = (float)biases[c];
  }
}
