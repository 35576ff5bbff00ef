/* Calls functions of portable arithmetic as a script on the standard input says, and prints a hash of
   what each call wrote. `test_processors.py` compiles this for several processors. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef void function(void);
struct named { const char *name; function *function; };
extern const struct named functions[]; /* made by the test */

/* Integers and pointers, and floating-point numbers, are passed in registers (or memory) of their own
   on x86-64 and ARM, in the order of each kind. So one type of function serves for all; a float is
   the lower half of its register. */
typedef void anything(long, long, long, long, long, long, long, long, long, long, long, long, long,
                      long, long, long, double, double, double, double);
#define INTEGERS 16
#define NUMBERS 4

static uint64_t state;

static uint64_t next(void) {
  state ^= state << 13, state ^= state >> 7, state ^= state << 17;
  return state * 0x2545f4914f6cdd1dull >> 32;
}

/* Multiples of 2^-24 from -2 to 2; if they are wild, one in eight is any pattern of 32 bits. */
static void fill(float *to, long count, uint64_t seed, int is_wild) {
  state = seed * 2 + 1;
  for (int i = 0; i < 20; i++) next();
  for (long i = 0; i < count; i++) {
    to[i] = ((int32_t)(next() & 0x3ffffff) - 0x2000000) * 0x1p-24f;
    uint32_t pattern = next();
    if (is_wild && next() % 8 == 0) memcpy(to + i, &pattern, 4);
  }
}

static uint64_t hashed(uint64_t hash, const float *of, long count) {
  for (long i = 0; i < count; i++) {
    uint32_t bits;
    memcpy(&bits, of + i, 4);
    if (of[i] != of[i]) bits = 0x7fc00000; /* the bits of NaN are the processor's */
    hash = (hash ^ bits) * 0x100000001b3ull;
  }
  return hash;
}

static function *named(const char *name) {
  for (const struct named *one = functions; one->name; one++)
    if (!strcmp(one->name, name)) return one->function;
  fprintf(stderr, "no function %s\n", name);
  exit(1);
}

static void *memory(long bytes) {
  void *got = aligned_alloc(64, (bytes + 127) / 64 * 64);
  if (!got) exit(1);
  memset(got, 0, (bytes + 127) / 64 * 64);
  return got;
}

/* Read one argument: a letter and what it needs. */
int main(void) {
  char name[100], kind;
  long arguments;
  while (scanf("%99s %ld", name, &arguments) == 2) {
    long integers[INTEGERS] = {0}, outputs[INTEGERS], sizes[INTEGERS], count, seed;
    double numbers[NUMBERS] = {0};
    int at = 0, number = 0, output = 0;
    for (long i = 0; i < arguments; i++) {
      if (scanf(" %c", &kind) != 1) return 1;
      float *floats;
      long *longs;
      switch (kind) {
        case 'l': if (scanf("%ld", &integers[at++]) != 1) return 1; break;
        case 'd': if (scanf("%lf", &numbers[number++]) != 1) return 1; break;
        case 'f': if (scanf("%f", (float *)&numbers[number++]) != 1) return 1; break;
        case 't': /* a table of longs */
          if (scanf("%ld", &count) != 1) return 1;
          integers[at++] = (long)(longs = memory(count * 8));
          while (count--) if (scanf("%ld", longs++) != 1) return 1;
          break;
        case 'i': case 'w': /* input: plain or wild numbers */
          if (scanf("%ld %ld", &count, &seed) != 2) return 1;
          integers[at++] = (long)(floats = memory(count * 4));
          fill(floats, count, seed, kind == 'w');
          break;
        case 'o': case 's': /* output, or scratch */
          if (scanf("%ld", &count) != 1) return 1;
          integers[at++] = (long)(floats = memory(count * 4));
          if (kind == 'o') outputs[output] = (long)floats, sizes[output++] = count;
      }
    }
    ((anything *)named(name))(integers[0], integers[1], integers[2], integers[3], integers[4],
                              integers[5], integers[6], integers[7], integers[8], integers[9],
                              integers[10], integers[11], integers[12], integers[13], integers[14],
                              integers[15], numbers[0], numbers[1], numbers[2], numbers[3]);
    uint64_t hash = 0xcbf29ce484222325ull;
    for (int i = 0; i < output; i++) hash = hashed(hash, (float *)outputs[i], sizes[i]);
    printf("%s %016llx\n", name, (unsigned long long)hash);
  }
  return 0;
}
