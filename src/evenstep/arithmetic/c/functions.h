/* Elementary functions of one float32, for the loops of other files.

   Every function is branch-free, so that a loop that calls it becomes vectors. Hot ones compute in
   binary32 with fused multiply-adds, the others in binary64 (without) and round once. Polynomials
   are minimax: coefficients by Remez exchange, those of binary32 rounded one after the other with
   the rest fitted anew. They are evaluated by Horner's rule from the highest degree.

   Errors are in units in the last place (ulp) of the float32, for all arguments; those of functions
   in binary64 are below 0.51. */
#ifndef EVENSTEP_FUNCTIONS_H
#define EVENSTEP_FUNCTIONS_H

#include "portable.h"

#define INF __builtin_inff()
#define NOT_A_NUMBER __builtin_nanf("")

/* a * b + c, rounded twice */
INLINE double muladd64(double a, double b, double c) { return a * b + c; }

/* Polynomials of x by their coefficients, the lowest degree first; `step` is fma32 or muladd64. */
#define P2(step, x, a, b) step(b, x, a)
#define P3(step, x, a, ...) step(P2(step, x, __VA_ARGS__), x, a)
#define P4(step, x, a, ...) step(P3(step, x, __VA_ARGS__), x, a)
#define P5(step, x, a, ...) step(P4(step, x, __VA_ARGS__), x, a)
#define P6(step, x, a, ...) step(P5(step, x, __VA_ARGS__), x, a)
#define P7(step, x, a, ...) step(P6(step, x, __VA_ARGS__), x, a)
#define P8(step, x, a, ...) step(P7(step, x, __VA_ARGS__), x, a)
#define P9(step, x, a, ...) step(P8(step, x, __VA_ARGS__), x, a)
#define P10(step, x, a, ...) step(P9(step, x, __VA_ARGS__), x, a)
#define P11(step, x, a, ...) step(P10(step, x, __VA_ARGS__), x, a)
#define P12(step, x, a, ...) step(P11(step, x, __VA_ARGS__), x, a)
#define P13(step, x, a, ...) step(P12(step, x, __VA_ARGS__), x, a)

INLINE float magnitude(float x) { return float_of(bits_of(x) & 0x7fffffffu); }
INLINE float with_sign(float x, float of) {
  return float_of((bits_of(x) & 0x7fffffffu) | (bits_of(of) & 0x80000000u));
}
/* |x| or the limit, whichever is smaller; the limit for NaN */
INLINE float limited(float x, float limit) {
  uint32_t u = bits_of(x) & 0x7fffffffu, most = bits_of(limit);
  return float_of(u < most ? u : most);
}

/* ---- exp and log in binary32 ---- */

/* exp(x) = 2^n * (1 + part), n = round(x / ln 2), for |x| < 128; returns the part. */
INLINE float exp_part(float x, int32_t *n) {
  float shifted = fma32(x, 0x1.715476p+0f, 0x1.8p23f), whole = shifted - 0x1.8p23f;
  *n = (int32_t)(bits_of(shifted) - bits_of(0x1.8p23f));
  float high = fma32(whole, -0x1.62e4p-1f, x); /* exact: the constant has 15 bits */
  float r = fma32(whole, -0x1.7f7d1cp-20f, high);
  float p = P5(fma32, r, 0x1.fffffcp-2f, 0x1.55548cp-3f, 0x1.55585ap-5f, 0x1.123d7p-7f,
               0x1.6ab89cp-10f);
  return high + fma32(whole, -0x1.7f7d1cp-20f, r * r * p); /* r, without its rounding */
}

/* x * 2^n for -252 <= n <= 254, rounded once more if it is denormal */
INLINE float scaled(float x, int32_t n) {
  int32_t half = n >> 1;
  return x * float_of((uint32_t)(half + 127) << 23) * float_of((uint32_t)(n - half + 127) << 23);
}

/* e^x within 1 ulp */
INLINE float exp32(float x) {
  x = x > 89.0f ? 89.0f : x; /* e^89 is infinite, e^-104 is less than half the least denormal */
  x = x < -104.0f ? -104.0f : x;
  int32_t n;
  float part = exp_part(x, &n);
  return scaled(1.0f + part, n);
}

/* ln x within 1 ulp: x = 2^k * (1 + f), 2/3 <= 1 + f < 4/3 */
INLINE float log32(float x) {
  int is_small = x < 0x1p-126f;
  uint32_t u = bits_of(is_small ? x * 0x1p23f : x) - 0x3f2aaaabu;
  float f = float_of((u & 0x7fffffu) + 0x3f2aaaabu) - 1.0f;
  float k = (float)((int32_t)u >> 23) - (is_small ? 23.0f : 0.0f);
  float whole = k * 0x1.62e4p-1f; /* exact */
  float sum = whole + f, rest = f - (sum - whole);
  float p = P9(fma32, f, 0x1.555556p-2f, -0x1.ffff02p-3f, 0x1.99985ep-3f, -0x1.559bb2p-3f,
               0x1.24d7aap-3f, -0x1.f3392p-4f, 0x1.bb4424p-4f, -0x1.07b074p-3f, 0x1.dff614p-4f);
  float y = sum + fma32(f * f, fma32(p, f, -0.5f), fma32(k, 0x1.7f7d1cp-20f, rest));
  y = x < INF ? y : x;
  return x > 0.0f ? y : x == 0.0f ? -INF : NOT_A_NUMBER;
}

/* ---- parts in binary64: relative errors below 2^-31 for exp and 2^-40 for log ---- */

/* exp(x) - 1 = power - 1 + power * part, without the sign of zero. |x| beyond 250 counts as 250:
   as a float32, exp(x) is infinite or 0 there. */
INLINE double exp_part64(double x, double *power) {
  x = x > 250.0 ? 250.0 : x;
  x = x < -250.0 ? -250.0 : x;
  double shifted = x * 0x1.71547652b82fep+0 + 0x1.8p52;
  *power = double_of((bits_of_double(shifted) << 52) + bits_of_double(1.0));
  double r = x - (shifted - 0x1.8p52) * 0x1.62e42fefa39efp-1;
  double p = P6(muladd64, r, 0x1.0000002dd33fap-1, 0x1.555555a6ac68ap-3, 0x1.55549e4d58c89p-5,
                0x1.11101d0ad2521p-7, 0x1.6d83f55cb6f7cp-10, 0x1.a2a3e0dd6d105p-13);
  return r + r * r * p;
}

INLINE double exp64(double x) {
  double power, part = exp_part64(x, &power);
  return power + power * part;
}
INLINE double expm1_64(double x) {
  double power, part = exp_part64(x, &power);
  return power * part + (power - 1.0);
}

/* ln(1 + x), where `sum` is 1 + x rounded, or any number whose logarithm is asked for, and then `x`
   is sum - 1. sum = 2^k * (1 + f), and ln(1 + f) = 2 artanh(f / (2 + f)). */
INLINE double log_of_sum(double x, double sum) {
  uint64_t u = bits_of_double(sum) - 0x3fe5555555555555u;
  double f = double_of((u & 0xfffffffffffffu) + 0x3fe5555555555555u) - 1.0;
  double k = double_of(((u + (1024ull << 52)) >> 52) | bits_of_double(0x1p52)) - (0x1p52 + 1024.0);
  f = k == 0.0 ? x : f;
  double s = f / (2.0 + f), z = s * s;
  double p = P5(muladd64, z, 0x1.555555591cc35p-2, 0x1.99998f36e464p-3, 0x1.2496e913f1cd7p-3,
                0x1.c5523e943bf6cp-4, 0x1.9c2d7d8fd7fffp-4);
  double y = 2.0 * s * (1.0 + z * p) + k * 0x1.62e42fefa39efp-1;
  y = sum < (double)INF ? y : sum;
  return sum > 0.0 ? y : sum == 0.0 ? -(double)INF : (double)NOT_A_NUMBER;
}

INLINE double log64(double x) { return log_of_sum(x - 1.0, x); }
INLINE double log1p64(double x) { return log_of_sum(x, 1.0 + x); }

/* ln(1 + e^x) for x <= 0: 2 artanh(e^x / (2 + e^x)) */
INLINE double log1p_exp64(double x) {
  double e = exp64(x), s = e / (2.0 + e), z = s * s;
  double p = P6(muladd64, z, 0x1.5555553b29a7cp-2, 0x1.9999bcf104e0ep-3, 0x1.248a5eab06e78p-3,
                0x1.c8bafcbece437p-4, 0x1.5f384256c55e3p-4, 0x1.be38d5bb85c2cp-4);
  return 2.0 * s * (1.0 + z * p);
}
/* ln(1 + e^x) */
INLINE double softplus64(double x) { return (x > 0.0 ? x : 0.0) + log1p_exp64(x > 0.0 ? -x : x); }

/* ---- exponentials and logarithms in binary64 ---- */

INLINE float exp2_32(float x) { return (float)exp64((double)x * 0x1.62e42fefa39efp-1); }
INLINE float expm1_32(float x) { return with_sign((float)expm1_64(x), x); }
INLINE float log2_32(float x) { return (float)(log64(x) * 0x1.71547652b82fep+0); }
INLINE float log10_32(float x) { return (float)(log64(x) * 0x1.bcb7b1526e50ep-2); }
INLINE float log1p32(float x) {
  float y = (float)log1p64(x);
  return x == 0.0f ? x : y;
}

/* sinh x = (m + m / (m + 1)) / 2 with m = exp(|x|) - 1 */
INLINE float sinh32(float x) {
  double m = expm1_64(magnitude(x));
  return with_sign((float)(0.5 * (m + m / (m + 1.0))), x);
}
INLINE float cosh32(float x) {
  double e = exp64(magnitude(x));
  return (float)(0.5 * (e + 1.0 / e));
}
/* tanh x = m / (m + 2) with m = exp(2 |x|) - 1 */
INLINE float tanh32(float x) {
  double m = expm1_64(2.0 * (double)magnitude(x));
  return with_sign((float)(m / (m + 2.0)), x);
}

INLINE float asinh32(float x) {
  double a = magnitude(x), square = a * a;
  float y = (float)log1p64(a + square / (1.0 + __builtin_sqrt(1.0 + square)));
  return magnitude(x) < INF ? with_sign(y, x) : x;
}
INLINE float acosh32(float x) {
  double t = (double)x - 1.0;
  float y = (float)log1p64(t + __builtin_sqrt(t * (t + 2.0)));
  return x < 1.0f ? NOT_A_NUMBER : y;
}
INLINE float atanh32(float x) {
  double a = magnitude(x);
  return with_sign((float)(0.5 * log1p64(2.0 * a / (1.0 - a))), x);
}

/* s and p with e^-a = p / s, 1 <= s, multiplied by 2^-32, for 0 <= a <= 110 */
INLINE float exp_quotient(float a, float *s) {
  int32_t n;
  float part = exp_part(-a, &n);
  *s = float_of((uint32_t)(95 - n) << 23);
  return (1.0f + part) * 0x1p-32f;
}
/* 1 / (1 + e^-x) within 2.5 ulp: p / (s + p) for negative x, s / (s + p) for positive */
INLINE float sigmoid32(float x) {
  float s, p = exp_quotient(limited(x, 110.0f), &s);
  float y = (x < 0.0f ? p : s) / (s + p);
  return x == x ? y : x;
}

/* ---- powers and roots ---- */

/* x^y as IEEE-754 `pow` has it */
INLINE float pow32(float x, float y) {
  double a = magnitude(x), b = y, half = 0.5 * b;
  double result = exp64(b * log64(a));
  int is_whole = (b + 0x1.8p52) - 0x1.8p52 == b, is_even = (half + 0x1.8p52) - 0x1.8p52 == half;
  int is_negative = bits_of(x) >> 31;
  result = a == 1.0 && y == y ? 1.0 : result; /* also for infinite y */
  result = is_negative & is_whole & !is_even ? -result : result;
  int is_finite = (a > 0.0) & (a < (double)INF);
  result = is_negative & is_finite & !is_whole ? (double)NOT_A_NUMBER : result;
  return x == 1.0f || y == 0.0f ? 1.0f : (float)result;
}
INLINE float cube32(float x) { return (float)((double)x * x * x); }
/* 1 / sqrt(x) within 1 ulp: the quotient is corrected by its own remainder and the root's. */
INLINE float rsqrt32(float x) {
  uint32_t is_small = x < 0x1p-96f;
  float scaled = x * float_of((127 + is_small * 48) << 23);
  float root = __builtin_sqrtf(scaled), y = 1.0f / root;
  float of_root = fma32(-root, root, scaled), of_quotient = fma32(-root, y, 1.0f);
  float corrected = fma32(y, fma32(-0.5f * y, of_root * y, of_quotient), y);
  y = (x > 0.0f) & (x < INF) ? corrected : y;
  return y * float_of((127 + is_small * 24) << 23);
}
INLINE float hypot32(float x, float y) {
  double square = (double)x * x + (double)y * y;
  float length = (float)__builtin_sqrt(square);
  return magnitude(x) == INF || magnitude(y) == INF ? INF : length;
}

/* ---- the error function, within 1 ulp ---- */

/* erf x = x + x P(x^2) for |x| < 1, else 1 - exp(Q(|x|)) */
INLINE float erf32(float x) {
  float a = magnitude(x), z = x * x;
  float p = P7(fma32, z, 0x1.06eba8p-3f, -0x1.81273ep-2f, 0x1.ce2ce6p-4f, -0x1.b7f71ap-6f,
               0x1.53f224p-8f, -0x1.a3515ep-11f, 0x1.4771fep-14f);
  float t = a > 3.95f ? 3.95f : a; /* erf of it is 1 */
  float q = P8(fma32, t, 0x1.8a56acp-13f, -0x1.212c0cp+0f, -0x1.44356ep-1f, -0x1.bc14bap-4f,
               0x1.9d01ccp-6f, -0x1.138a76p-8f, 0x1.cebd2p-12f, -0x1.6bc9a2p-16f);
  int32_t n;
  float part = exp_part(q, &n);
  float power = float_of((uint32_t)(n + 127) << 23);
  float large = with_sign((1.0f - power) - power * part, x);
  return a < 1.0f ? fma32(x, p, x) : large;
}

/* exp(a^2) erfc(a) for 0 <= a <= 10.2: P((a - 3) / (a + 3)) / (1 + 2 a) */
INLINE double erfcx64(double a) {
  double v = (a - 3.0) / (a + 3.0);
  double p = P13(muladd64, v, 0x1.40c522d7e0ef3p+0, -0x1.15c084d66405p-3, -0x1.85a15c1acaef5p-5,
                 0x1.09836c5e93a5p-3, -0x1.e88b7d6e8c42fp-4, 0x1.17c97699144e2p-4,
                 -0x1.857708f5ff745p-6, 0x1.4c13df412a977p-9, 0x1.f093b3ae662bfp-10,
                 -0x1.9e317bc9b9fc5p-11, -0x1.09ce93283465ap-13, 0x1.09b704607e62fp-13,
                 0x1.15af0fcb5d41ap-15);
  return p / (1.0 + 2.0 * a);
}
INLINE float erfc32(float x) {
  double a = magnitude(x);
  a = a > 10.2 ? 10.2 : a; /* less than half the least denormal */
  double y = exp64(-a * a) * erfcx64(a);
  return (float)(x < 0.0f ? 2.0 - y : y);
}

/* x P(w) with w = -ln(1 - x^2), within 0.53 ulp */
INLINE float erfinv32(float x) {
  double w = -log64((1.0 - (double)x) * (1.0 + (double)x));
  double u = (w < 5.0 ? w : 5.0) - 2.5, v = __builtin_sqrt(w) - 3.0;
  double near = P13(muladd64, u, 0x1.805c5cfd1512p+0, 0x1.f91e8993ce8c9p-3, -0x1.11c3c53775403p-8,
                    -0x1.4863ce52d5e04p-10, 0x1.c9b4de55d0316p-13, -0x1.4f47238c685ffp-18,
                    -0x1.cab716e055cp-19, 0x1.0100427bdb19dp-21, 0x1.dcb7b7be4cd1dp-27,
                    -0x1.7547601fa81cp-27, 0x1.bb3782aec3e09p-31, 0x1.0fca178033e8ap-33,
                    -0x1.5bc2d4c742a54p-36);
  double far = P11(muladd64, v, 0x1.6a9efbda32ba8p+1, 0x1.006dc9c6d111p+0, 0x1.358182cd8bf66p-7,
                   -0x1.f4ded102e97adp-8, 0x1.74b3c5eae8f57p-8, -0x1.d3a39d1abfda9p-9,
                   0x1.8362aab07001dp-10, -0x1.effd017bcdf65p-14, -0x1.274a18e0b869dp-12,
                   0x1.4dc98c6bf5a1ep-13, -0x1.c7e9c63cd3b2ap-16);
  float y = (float)((double)x * (w < 5.0 ? near : far));
  return magnitude(x) == 1.0f ? x * INF : y;
}

/* ---- sines, within 1 ulp ---- */

/* x = r + quadrant * pi / 2 for |x| <= 2^17: pi / 2 in two parts, the product of the first exact */
INLINE double reduced(float x, uint64_t *quadrant) {
  double shifted = (double)x * 0x1.45f306dc9c883p-1 + 0x1.8p52, n = shifted - 0x1.8p52;
  *quadrant = bits_of_double(shifted);
  return ((double)x - n * 0x1.921fb544p+0) - n * 0x1.0b4611a626331p-34;
}

INLINE double sine_part(double r) {
  double z = r * r;
  double p = P4(muladd64, z, -0x1.5555554c6ffd2p-3, 0x1.111108690d22bp-7, -0x1.a00f7e15bfed7p-13,
                0x1.6cd1b0cba6c26p-19);
  return r * (1.0 + z * p);
}
INLINE double cosine_part(double r) {
  double z = r * r;
  double p = P4(muladd64, z, 0x1.5555554ed82f1p-5, -0x1.6c16b828a84c1p-10, 0x1.a010dde0e397dp-16,
                -0x1.241e6acfd2c2ep-22);
  return (1.0 - 0.5 * z) + z * z * p;
}
/* sin(r + quadrant * pi / 2) */
INLINE float sine_of(double r, uint64_t quadrant) {
  double y = quadrant & 1 ? cosine_part(r) : sine_part(r);
  return (float)(quadrant & 2 ? -y : y);
}
INLINE float cosine_of(double r, uint64_t quadrant) { return sine_of(r, quadrant + 1); }
INLINE float tangent_of(double r, uint64_t quadrant) {
  double s = sine_part(r), c = cosine_part(r);
  return (float)(quadrant & 1 ? -c / s : s / c);
}

/* ---- arcs, within 1 ulp ---- */

/* the angle from the axis, in [0, pi / 2], of a point whose coordinates are not negative */
INLINE double angle(double along, double across) {
  int is_steep = across > along;
  double small = is_steep ? along : across, large = is_steep ? across : along;
  double q = small == large ? (small == 0.0 ? 0.0 : 1.0) : small / large, z = q * q;
  double p = P12(muladd64, z, -0x1.5555552f2807bp-2, 0x1.9999846c675cdp-3, -0x1.249039236f318p-3,
                 0x1.c6e85ae085b8bp-4, -0x1.72d6305d10c7ap-4, 0x1.33a16c9046d9ep-4,
                 -0x1.f02f994f3d714p-5, 0x1.69ea51313e3b9p-5, -0x1.b2f57da7dc498p-6,
                 0x1.81f6734adc485p-7, -0x1.b4026d57ebceep-9, 0x1.ce19b3eec1dc2p-12);
  double y = q * (1.0 + z * p);
  return is_steep ? 0x1.921fb54442d18p+0 - y : y;
}
INLINE float atan32(float x) { return with_sign((float)angle(1.0, magnitude(x)), x); }
INLINE float atan2_32(float y, float x) {
  double a = angle(magnitude(x), magnitude(y));
  return with_sign((float)(bits_of(x) >> 31 ? 0x1.921fb54442d18p+1 - a : a), y);
}
INLINE float asin32(float x) {
  double a = magnitude(x);
  return with_sign((float)angle(__builtin_sqrt((1.0 - a) * (1.0 + a)), a), x);
}
INLINE float acos32(float x) {
  double a = magnitude(x), b = angle(a, __builtin_sqrt((1.0 - a) * (1.0 + a)));
  return (float)(x < 0.0f ? 0x1.921fb54442d18p+1 - b : b);
}

#endif
