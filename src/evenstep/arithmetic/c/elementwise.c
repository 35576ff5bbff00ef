/* Functions of single elements, their gradients, linear combinations, losses before their
   reduction, and random numbers. */
#include "functions.h"

/* out[i] = expression, for all i */
#define EACH(expression) { for (long i = 0; i < n; i++) out[i] = (expression); }
#define UNARY(name, function) \
  PORTABLE void unary_##name(long n, const float *x, float *out) EACH(function(x[i]))
#define BINARY(name, function)                                                         \
  PORTABLE void binary_##name(long n, const float *x, const float *y, float *out) EACH( \
      function(x[i], y[i]))

/* ---- elementary functions ---- */

UNARY(exp, exp32) UNARY(exp2, exp2_32) UNARY(expm1, expm1_32) UNARY(log, log32) UNARY(log2, log2_32)
UNARY(log10, log10_32) UNARY(log1p, log1p32) UNARY(sinh, sinh32) UNARY(cosh, cosh32)
UNARY(tanh, tanh32) UNARY(asinh, asinh32) UNARY(acosh, acosh32) UNARY(atanh, atanh32)
UNARY(asin, asin32) UNARY(acos, acos32) UNARY(atan, atan32) UNARY(erf, erf32) UNARY(erfc, erfc32)
UNARY(erfinv, erfinv32) UNARY(rsqrt, rsqrt32) UNARY(sigmoid, sigmoid32) UNARY(cube, cube32)
UNARY(sqrt, __builtin_sqrtf) BINARY(atan2, atan2_32) BINARY(hypot, hypot32) BINARY(pow, pow32)

PORTABLE void power(long n, const float *x, double exponent, float *out)
    EACH(pow32(x[i], (float)exponent))

INLINE float xlogy(float x, float y) { return x == 0.0f && y == y ? 0.0f : (float)(x * log64(y)); }
INLINE float xlog1py(float x, float y) {
  return x == 0.0f && y == y ? 0.0f : (float)(x * log1p64(y));
}
/* log(e^x + e^y), by the larger and the difference */
INLINE double log_add_exp(float x, float y, double unit) {
  double large = x > y ? x : y, gap = x == y ? 0.0 : (double)x - (double)y;
  gap = gap > 0.0 ? -gap : gap;
  return large + log1p_exp64(gap * unit) / unit;
}
INLINE float logaddexp(float x, float y) { return (float)log_add_exp(x, y, 1.0); }
INLINE float logaddexp2(float x, float y) { return (float)log_add_exp(x, y, 0x1.62e42fefa39efp-1); }
BINARY(xlogy, xlogy) BINARY(xlog1py, xlog1py) BINARY(logaddexp, logaddexp)
BINARY(logaddexp2, logaddexp2)

INLINE double between(double x, double low, double high) {
  return x < low ? low : x > high ? high : x;
}
INLINE double logit_of(double x) { return log64(x / (1.0 - x)); }
PORTABLE void logit(long n, const float *x, double low, double high, float *out)
    EACH((float)logit_of(between(x[i], low, high)))

/* ---- sines of any size ---- */

/* x = r + quadrant * pi / 2 for finite |x| >= 2^17 (Payne and Hanek, "Radian reduction for
   trigonometric functions", 1983). Of the digits of 2 / pi, the first ones, whose products with
   x = whole * 2^e are multiples of 4, are left out; 96 of those that follow suffice. */
static double reduced_large(float x, uint64_t *quadrant) {
  static const uint32_t digits[] = {0,           0xa2f9836eu, 0x4e441529u, 0xfc2757d1u,
                                    0xf534ddc0u, 0xdb629599u, 0x3c439041u, 0xfe5163abu};
  uint32_t u = bits_of(x);
  uint64_t whole = (u & 0x7fffffu) | 0x800000u, words[3];
  int first = (int)(u >> 23 & 255) - 150 + 30; /* e + 30: after 32 zeros, the digit of 2^(1 - e) */
  for (int i = 0; i < 3; i++) {
    const uint32_t *from = digits + (first >> 5) + i;
    words[i] = (((uint64_t)from[0] << 32 | from[1]) << (first & 31)) >> 32;
  }
  uint64_t turns = ((whole * words[0]) << 32) + whole * words[1] + ((whole * words[2]) >> 32);
  /* The two highest bits count quarters of a turn; the rest is a signed part of a quarter. */
  int64_t rest = (int64_t)(turns << 2);
  uint64_t count = (turns >> 62) + (rest < 0);
  double r = (double)rest * 0x1.921fb54442d18p-64;
  *quadrant = x < 0 ? -count : count;
  return x < 0 ? -r : r;
}

#define CIRCULAR(name, function)                                      \
  PORTABLE void unary_##name(long n, const float *x, float *out) {    \
    int has_large = 0;                                                \
    for (long i = 0; i < n; i++) {                                    \
      uint64_t quadrant;                                              \
      double r = reduced(x[i], &quadrant);                            \
      out[i] = function(r, quadrant);                                 \
      has_large |= magnitude(x[i]) > 0x1p17f;                         \
    }                                                                 \
    for (long i = 0; has_large && i < n; i++)                         \
      if (magnitude(x[i]) > 0x1p17f && magnitude(x[i]) < INF) {       \
        uint64_t quadrant;                                            \
        double r = reduced_large(x[i], &quadrant);                    \
        out[i] = function(r, quadrant);                               \
      }                                                               \
  }
CIRCULAR(sin, sine_of) CIRCULAR(cos, cosine_of) CIRCULAR(tan, tangent_of)

/* ---- activations: max(x, 0) - |x| s, with s a function of -|x| that falls from 1/2 to 0 ---- */

INLINE float positive_part(float x) { return x < 0.0f ? -0.0f : x; }

/* x / (1 + e^-x) within 3.5 ulp */
INLINE float silu(float x) {
  float a = limited(x, 110.0f), s, p = exp_quotient(a, &s);
  return positive_part(x) - a * (p * 0x1p32f) / (s + p) * 0x1p-32f;
}

/* e^(-a^2 / 2), as p * 2^n, and `mills` with the probability mills * e^(-a^2 / 2) that a normal
   number is below -a, for 0 <= a <= 15: P(v) / (a + 2.5), v = a / (a + 2.5) */
INLINE float normal_tail(float a, float *mills, int32_t *n) {
  float half = -0.5f * a, power = half * a, rest = fma32(half, a, -power);
  float p = 1.0f + exp_part(power, n);
  float inverse = 1.0f / (a + 2.5f), v = a * inverse;
  *mills = inverse * P10(fma32, v, 0x1.4p+0f, -0x1.3e4f14p+0f, 0x1.5b6ecep-3f, 0x1.2a8596p-2f,
                         0x1.d8d022p-5f, -0x1.3caa2cp-3f, 0x1.2c36f6p-3f, -0x1.4a2576p-2f,
                         0x1.23d06p-2f, -0x1.4c21f6p-4f);
  return fma32(rest, p, p);
}
/* x times the probability that a normal number is below x, within 6 ulp */
INLINE float gelu(float x) {
  int32_t n;
  float a = limited(x, 15.0f), mills, p = normal_tail(a, &mills, &n);
  return positive_part(x) - scaled(a * p * mills, n);
}
INLINE float gelu_slope(float x) {
  int32_t n;
  float a = limited(x, 15.0f), mills, p = normal_tail(a, &mills, &n);
  float h = scaled(p * fma32(a, -0x1.988454p-2f, mills), n); /* 1 / sqrt(2 pi) */
  float y = x < 0.0f ? h : 1.0f - h;
  return x == x ? y : x;
}
INLINE float silu_slope(float x) {
  float a = limited(x, 110.0f), s, p = exp_quotient(a, &s), inverse = 1.0f / (s + p);
  float h = p * inverse * fma32(-a, s * inverse, 1.0f), y = x < 0.0f ? h : 1.0f - h;
  return x == x ? y : x;
}

/* The approximation by tanh is x / (1 + e^-u) with u = sqrt(8 / pi) (x + 0.044715 x^3). */
INLINE double gelu_tanh_argument(double a) {
  return 0x1.9884533d43651p+0 * (a + 0.044715 * (a * a * a));
}
INLINE double far(float x) { /* |x|, at most 100, where the functions below have their limits */
  double a = magnitude(x);
  return a > 100.0 ? 100.0 : a;
}
INLINE float gelu_tanh(float x) {
  double a = far(x);
  return (float)(positive_part(x) - a / (1.0 + exp64(gelu_tanh_argument(a))));
}
INLINE float gelu_tanh_slope(float x) {
  double a = far(x), below = 1.0 / (1.0 + exp64(gelu_tanh_argument(a)));
  double slope = 0x1.9884533d43651p+0 * (1.0 + 3.0 * 0.044715 * (a * a));
  double h = below - a * slope * (below * (1.0 - below));
  return (float)(x < 0.0f ? h : 1.0 - h);
}

/* x tanh(ln(1 + e^x)) = x w / (w + 2) with w = (1 + e^x)^2 - 1 */
INLINE float mish(float x) {
  double e = exp64(x), w = e * (e + 2.0), b = x < -250.0f ? -250.0 : x;
  return (float)(b * (w / (w + 2.0)));
}
INLINE float mish_slope(float x) {
  double b = between(x, -250.0, 80.0), e = exp64(b), w = e * (e + 2.0), inverse = 1.0 / (w + 2.0);
  return (float)(w * inverse + 4.0 * b * e * (1.0 + e) * inverse * inverse);
}

INLINE float log_sigmoid(float x) { return (float)-softplus64(-(double)x); }
INLINE float up_to_six(float x) { return x < 0.0f ? 0.0f : x > 6.0f ? 6.0f : x; }
INLINE float hardswish(float x) { return x * up_to_six(x + 3.0f) / 6.0f; }
INLINE float hardsigmoid(float x) { return up_to_six(x + 3.0f) / 6.0f; }

UNARY(silu, silu) UNARY(gelu, gelu) UNARY(gelu_tanh, gelu_tanh) UNARY(mish, mish)
UNARY(log_sigmoid, log_sigmoid) UNARY(hardswish, hardswish) UNARY(hardsigmoid, hardsigmoid)

PORTABLE void softplus(long n, const float *x, double beta, double threshold, float *out)
    EACH(x[i] * beta > threshold ? x[i] : (float)(softplus64(x[i] * beta) / beta))
PORTABLE void elu(long n, const float *x, double negative, double scale, double inner, float *out)
    EACH((float)(x[i] < 0.0f ? negative * expm1_64(x[i] * inner) : scale * x[i]))

/* ---- gradients: that of the result, g, times the slope at x, or where the result is x ---- */

#define SLOPE(name, slope)                                                                    \
  PORTABLE void binary_##name##_backward(long n, const float *g, const float *x, float *out) \
      EACH(g[i] * slope(x[i]))

INLINE float sigmoid_slope(float y) { return (1.0f - y) * y; }
INLINE float tanh_slope(float y) { return fma32(-y, y, 1.0f); }
INLINE float log_sigmoid_slope(float x) { return sigmoid32(-x); }
INLINE float hardsigmoid_slope(float x) { return (x > -3.0f) & (x < 3.0f) ? 1.0f / 6.0f : 0.0f; }
INLINE float hardswish_slope(float x) {
  return x <= -3.0f ? 0.0f : x < 3.0f ? x / 3.0f + 0.5f : 1.0f;
}
SLOPE(sigmoid, sigmoid_slope) SLOPE(tanh, tanh_slope) SLOPE(silu, silu_slope)
SLOPE(gelu, gelu_slope) SLOPE(gelu_tanh, gelu_tanh_slope) SLOPE(mish, mish_slope)
SLOPE(log_sigmoid, log_sigmoid_slope) SLOPE(hardsigmoid, hardsigmoid_slope)
SLOPE(hardswish, hardswish_slope)

PORTABLE void softplus_backward(long n, const float *g, const float *x, double beta,
                                double threshold, float *out)
    EACH(x[i] * beta > threshold ? g[i] : g[i] * sigmoid32((float)(x[i] * beta)))
PORTABLE void elu_backward(long n, const float *g, const float *x, double negative, double scale,
                           double inner, float *out)
    EACH(g[i] * (x[i] <= 0.0f ? (float)(negative * inner) * exp32(x[i] * (float)inner)
                              : (float)scale))
PORTABLE void elu_backward_of_result(long n, const float *g, const float *y, double negative,
                                     double scale, double inner, float *out)
    EACH((float)(g[i] * (y[i] <= 0.0f ? inner * (y[i] + negative) : scale)))
PORTABLE void logit_backward(long n, const float *g, const float *x, double low, double high,
                             double outside, float *out)
    EACH((float)((x[i] < low) | (x[i] > high) ? outside : g[i] / (x[i] * (1.0 - x[i]))))

/* ---- gated linear units: halves x and y ---- */

INLINE float glu(float x, float y) { return x * sigmoid32(y); }
INLINE float glu_slope(float x, float y) {
  float s = sigmoid32(y);
  return x * (s * (1.0f - s));
}
BINARY(glu, glu) BINARY(glu_slope, glu_slope)

/* ---- losses of x and the target y, or of their difference ---- */

INLINE float smooth_l1_of(float z, float beta) {
  return z < beta ? 0.5f * z * z / beta : z - 0.5f * beta;
}
INLINE float huber_of(float z, float delta) {
  return z <= delta ? 0.5f * z * z : delta * (z - 0.5f * delta);
}
PORTABLE void smooth_l1(long n, const float *difference, double beta, float *out)
    EACH(smooth_l1_of(magnitude(difference[i]), (float)beta))
PORTABLE void huber(long n, const float *difference, double delta, float *out)
    EACH(huber_of(magnitude(difference[i]), (float)delta))

INLINE float cross_entropy(float x, float y) {
  double of_one = between(log64(x), -100.0, INF), of_zero = between(log1p64(-(double)x), -100.0, INF);
  return (float)((y - 1.0) * of_zero - y * of_one);
}
INLINE float cross_entropy_slope(float x, float y) {
  return (float)(((double)x - y) / between((1.0 - x) * x, 1e-12, INF));
}
INLINE float cross_entropy_of_logits(float x, float y) {
  return (float)((1.0 - y) * x + softplus64(-(double)x));
}
INLINE float soft_margin(float x, float y) { return (float)softplus64(-((double)x * y)); }
INLINE float soft_margin_slope(float x, float y) { return -y * sigmoid32(-(x * y)); }
BINARY(cross_entropy, cross_entropy) BINARY(cross_entropy_slope, cross_entropy_slope)
BINARY(cross_entropy_of_logits, cross_entropy_of_logits) BINARY(soft_margin, soft_margin)
BINARY(soft_margin_slope, soft_margin_slope)

/* with a weight for the class 1 */
PORTABLE void cross_entropy_weighted(long n, const float *x, const float *y, const float *weight,
                                     float *out)
    EACH((float)((1.0 - y[i]) * x[i] +
                 ((weight[i] - 1.0) * y[i] + 1.0) * softplus64(-(double)x[i])))

/* ---- linear combinations, rounded once ---- */

PORTABLE void add_scaled(long n, const float *a, float alpha, const float *b, float *out)
    EACH(fma32(alpha, b[i], a[i]))
PORTABLE void add_product(long n, const float *a, float alpha, const float *b, const float *c,
                          float *out) EACH(fma32(alpha * b[i], c[i], a[i]))
PORTABLE void add_quotient(long n, const float *a, float alpha, const float *b, const float *c,
                           float *out) EACH(fma32(alpha, b[i] / c[i], a[i]))
/* a + weight * (b - a), from the nearer end (as torch.lerp) */
PORTABLE void interpolate(long n, const float *a, const float *b, float weight, float *out) {
  if (weight < 0.5f) EACH(fma32(weight, b[i] - a[i], a[i]))
  else EACH(fma32(weight - 1, b[i] - a[i], b[i]))
}

/* ---- remainders of division, which are exact ---- */

/* a - b * trunc(a / b), with the sign of a: multiples of b are subtracted, the largest first. Each
   quotient is below 2^28 and at least 2^-24 away from the integer above it, so binary64 does not
   round it up, and all other numbers are exact. */
static float remainder_of(float a, float b) {
  double rest = magnitude(a), by = magnitude(b);
  if (!(rest < (double)INF) || !(by > 0)) return NOT_A_NUMBER;
  while (rest >= by) {
    double multiple = by;
    while (multiple * 0x1p28 <= rest) multiple *= 0x1p28;
    rest -= (double)(int64_t)(rest / multiple) * multiple;
  }
  return with_sign((float)rest, a);
}
BINARY(remainder, remainder_of)

/* ---- random numbers of other laws, made of uniform ones ---- */

/* Box and Muller: for u in [0, 1), r = sqrt(-2 ln(1 - u[i])) and the angle 2 pi u[half + i] give two
   normal numbers, out[i] = r cos and out[half + i] = r sin. u and out have 2 * half numbers. */
PORTABLE void normals(long half, const float *u, float *out) {
  for (long i = 0; i < half; i++) {
    float r = __builtin_sqrtf(-2.0f * log32(1.0f - u[i]));
    float turns = 4.0f * u[half + i]; /* exact, as is the rest of them to the nearest quarter */
    int32_t quarter = (int32_t)(turns + 0.5f);
    double angle = (double)(turns - (float)quarter) * 0x1.921fb54442d18p+0;
    out[i] = r * cosine_of(angle, (uint64_t)quarter);
    out[half + i] = r * sine_of(angle, (uint64_t)quarter);
  }
}

/* -ln(1 - u), at least 2^-25: exponential numbers, never 0 */
INLINE float exponential(float u) {
  float y = -log32(1.0f - u);
  return y > 0x1p-25f ? y : 0x1p-25f;
}
UNARY(exponential, exponential)
