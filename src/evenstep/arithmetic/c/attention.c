/* Scaled dot-product attention: the products, sums and exponentials of other files, for each head.

   So it has the bits of its operations one by one, without their copies. */
#include "products.h"

void softmax(long log, long outer, long n, long inner, const float *x, float *out);
void softmax_gradient(long log, long outer, long n, long inner, const float *g, const float *y,
                      float *out);

/* Sizes, and the strides of operands: of batch, heads, places (targets or sources), and width. */
struct attention {
  long batch, heads, targets, sources, width, values; /* the widths of keys and of values */
  long is_causal, has_mask;
  long query[4], key[4], value[4], mask[4], grad[4];
};

/* A matrix that lies anywhere: its first element, and the strides of its rows and columns. */
struct matrix {
  const float *at;
  long strides[2];
};

INLINE struct matrix of_head(const float *at, const long *strides, long batch, long head) {
  return (struct matrix){at + batch * strides[0] + head * strides[1], {strides[2], strides[3]}};
}

INLINE struct matrix turned(struct matrix m) {
  return (struct matrix){m.at, {m.strides[1], m.strides[0]}};
}

/* c = alpha * a b + addend, which may be null; the columns of c lie one behind the other. */
static void times(long rows, long columns, long depth, struct matrix a, struct matrix b,
                  float alpha, struct matrix addend, float *c, long c_row, float *scratch) {
  struct product p = {.rows = rows, .columns = columns, .depth = depth, .a = a.at, .b = b.at,
                      .c = c, .alpha = alpha, .beta = 1, .addend = addend.at,
                      .addend_row = addend.strides[0],
                      .addend_column = addend.strides[1]};
  multiply_strided(&p, a.strides, b.strides, c_row, scratch);
}

/* The weights of one row: softmax, and 0 where a target sees no source. */
static void weigh(long sources, const float *scores, float *weights) {
  int sees_none = 1;
  for (long i = 0; i < sources; i++) sees_none &= scores[i] == -__builtin_inff();
  if (sees_none) memset(weights, 0, sources * sizeof(float));
  else softmax(0, 1, sources, 1, scores, weights);
}

/* weights = softmax(scale * query key^T + mask), contiguous; out = weights value, which lies as
   (batch, targets, heads, values). `scratch` has MULTIPLY_SCRATCH + 4 * (targets + sources +
   width + values) + sources floats. */
PORTABLE void attend(const struct attention *s, const float *query, const float *key,
                     const float *value, const float *mask, float *out, float *weights,
                     float scale, float *scratch) {
  const struct matrix none = {0};
  for (long batch = 0; batch < s->batch; batch++)
    for (long head = 0; head < s->heads; head++) {
      struct matrix q = of_head(query, s->query, batch, head);
      struct matrix k = of_head(key, s->key, batch, head);
      struct matrix v = of_head(value, s->value, batch, head);
      struct matrix m = s->has_mask ? of_head(mask, s->mask, batch, head) : none;
      float *w = weights + (batch * s->heads + head) * s->targets * s->sources;
      times(s->targets, s->sources, s->width, q, turned(k), scale, m, w, s->sources, scratch);
      for (long target = 0; target < s->targets; target++) {
        float *row = w + target * s->sources;
        for (long i = target + 1; s->is_causal && i < s->sources; i++) row[i] = -__builtin_inff();
        weigh(s->sources, row, row);
      }
      long step = s->heads * s->values;
      float *to = out + batch * s->targets * step + head * s->values;
      times(s->targets, s->values, s->sources, (struct matrix){w, {s->sources, 1}}, v, 1, none, to,
            step, scratch);
    }
}

/* The gradients of query, key and value, which lie as `out` does. `scratch` has 2 * targets *
   sources floats more. */
PORTABLE void attend_backward(const struct attention *s, const float *grad, const float *query,
                              const float *key, const float *value, const float *weights,
                              float *of_query, float *of_key, float *of_value, float scale,
                              float *scratch) {
  const struct matrix none = {0};
  long count = s->targets * s->sources, step = s->heads * s->width;
  float *of_weights = scratch, *of_scores = scratch + count;
  scratch += 2 * count + (-2 * count & 15);
  for (long batch = 0; batch < s->batch; batch++)
    for (long head = 0; head < s->heads; head++) {
      const float *w = weights + (batch * s->heads + head) * count;
      struct matrix g = of_head(grad, s->grad, batch, head);
      struct matrix q = of_head(query, s->query, batch, head);
      struct matrix k = of_head(key, s->key, batch, head);
      struct matrix v = of_head(value, s->value, batch, head);
      struct matrix d = {of_scores, {s->sources, 1}};
      times(s->sources, s->values, s->targets, (struct matrix){w, {1, s->sources}}, g, 1, none,
            of_value + (batch * s->sources * s->heads + head) * s->values, s->heads * s->values,
            scratch);
      times(s->targets, s->sources, s->values, g, turned(v), 1, none, of_weights, s->sources,
            scratch);
      softmax_gradient(0, s->targets, s->sources, 1, of_weights, w, of_scores);
      for (long i = 0; i < count; i++) of_scores[i] = of_scores[i] * scale;
      times(s->targets, s->width, s->sources, d, k, 1, none,
            of_query + batch * s->targets * step + head * s->width, step, scratch);
      times(s->sources, s->width, s->targets, turned(d), q, 1, none,
            of_key + batch * s->sources * step + head * s->width, step, scratch);
    }
}
