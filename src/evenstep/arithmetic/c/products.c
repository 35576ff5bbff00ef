/* Products of matrices, in tiles whose sums stay in registers. */
#include "products.h"

/* A tile has up to ROWS rows, and one or two times LANES columns. Blocks of the operands are read
   where they lie ("in place"), or copied ("packed") into panels of ROWS rows or of 2 * LANES columns,
   in the order in which tiles read them. None of these numbers changes a result. */
#if defined(__AVX512F__)
#define ROWS 12
#define LANES 16
#define EACH_SIZE(do) do(1) do(2) do(3) do(4) do(5) do(6) do(7) do(8) do(9) do(10) do(11) do(12)
#elif defined(__AVX2__) || defined(__aarch64__)
#define ROWS 6
#define LANES 8
#define EACH_SIZE(do) do(1) do(2) do(3) do(4) do(5) do(6)
#else
#define ROWS 4
#define LANES 4
#define EACH_SIZE(do) do(1) do(2) do(3) do(4)
#endif
#define COLUMNS (2 * LANES)
#define DEPTH_BLOCK (LANES == 16 ? 256 : 320)
#define ROW_BLOCK (LANES == 16 ? 192 : 96)
#define COLUMN_BLOCK 1024
#define FEW_COLUMNS 512 /* for which packing a would cost more than it brings */

_Static_assert(ROW_BLOCK % ROWS == 0 && COLUMN_BLOCK % COLUMNS == 0, "whole panels");
_Static_assert(DEPTH_BLOCK * (ROW_BLOCK + COLUMN_BLOCK + 4) <= MULTIPLY_SCRATCH, "scratch");

/* Sums are written as vectors: as numbers, the compiler copies them twice. */
typedef float vector __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

/* Rows are unrolled, and columns become vectors, so that all sums stay in registers. */
#define EACH_ROW(rows, ...)                                                                       \
  _Pragma("GCC unroll 16") for (int i = 0; i < rows; i++) {                                       \
    _Pragma("GCC unroll 1") for (int j = 0; j < columns; j++) __VA_ARGS__;                        \
  }

/* c(i, j) += the products of `depth` columns of a and rows of b, for a tile of constant size. The rows
   of a lie at `a_row`, or, if it is packed, one behind the other. */
INLINE void tile(int is_packed, int rows, int columns, long depth, const float *restrict a,
                 const long *restrict a_row, const long *restrict a_depth, const float *restrict b,
                 const long *restrict b_depth, float *c, const long *c_row, int is_begun) {
#define A(i) x[is_packed ? i : a_row[i]]
  float sum[ROWS][COLUMNS];
  if (!depth) {
    for (int i = 0; i < rows && !is_begun; i++) memset(c + c_row[i], 0, columns * sizeof(float));
    return;
  }
  const float *x = a + a_depth[0], *y = b + b_depth[0];
  if (is_begun) {
    EACH_ROW(rows, sum[i][j] = fma32(A(i), y[j], c[c_row[i] + j]))
  } else {
    EACH_ROW(rows, sum[i][j] = fma32(A(i), y[j], 0))
  }
  for (long k = 1; k < depth; k++) {
    x = a + a_depth[k], y = b + b_depth[k];
    EACH_ROW(rows, sum[i][j] = fma32(A(i), y[j], sum[i][j]))
  }
  for (int i = 0; i < rows; i++)
    for (int j = 0; j < columns; j += LANES)
      *(vector *)(c + c_row[i] + j) = *(vector *)(sum[i] + j);
#undef A
}

#define TILE(name, is_packed, rows, vectors)                                                      \
  static void name##rows##_##vectors(long depth, const float *a, const long *a_row,               \
                                     const long *a_depth, const float *b, const long *b_depth,    \
                                     float *c, const long *c_row, int is_begun) {                 \
    tile(is_packed, rows, vectors *LANES, depth, a, a_row, a_depth, b, b_depth, c, c_row,         \
         is_begun);                                                                               \
  }
#define TILES(rows)                                                                               \
  TILE(packed_, 1, rows, 1) TILE(packed_, 1, rows, 2)                                             \
  TILE(placed_, 0, rows, 1) TILE(placed_, 0, rows, 2)
EACH_SIZE(TILES)

typedef void (*tile_function)(long, const float *, const long *, const long *, const float *,
                              const long *, float *, const long *, int);

#define NAMES(rows) {{packed_##rows##_1, packed_##rows##_2}, {placed_##rows##_1, placed_##rows##_2}},
static const tile_function tiles[ROWS][2][2] = {EACH_SIZE(NAMES)};

/* Packing: to[k * width + x] = from[lane[x] + step[k]] */
typedef float four __attribute__((vector_size(16))), eight __attribute__((vector_size(32)));
typedef int32_t four_places __attribute__((vector_size(16)));
#if defined(__clang__)
#define PICK(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define PICK(a, b, ...) __builtin_shuffle(a, b, (four_places){__VA_ARGS__})
#endif

INLINE four load(const float *from) { four x; memcpy(&x, from, sizeof x); return x; }
INLINE void store(float *to, four x) { memcpy(to, &x, sizeof x); }

/* Four rows of four become four columns. */
INLINE void transpose_four(const float *from, const long *lane, float *to, long width) {
  four a = load(from + lane[0]), b = load(from + lane[1]);
  four c = load(from + lane[2]), d = load(from + lane[3]);
  four ab = PICK(a, b, 0, 4, 1, 5), cd = PICK(c, d, 0, 4, 1, 5);
  store(to, PICK(ab, cd, 0, 1, 4, 5));
  store(to + width, PICK(ab, cd, 2, 3, 6, 7));
  ab = PICK(a, b, 2, 6, 3, 7), cd = PICK(c, d, 2, 6, 3, 7);
  store(to + 2 * width, PICK(ab, cd, 0, 1, 4, 5));
  store(to + 3 * width, PICK(ab, cd, 2, 3, 6, 7));
}

/* Eight rows of four become four columns. */
#if defined(__AVX__) && __has_builtin(__builtin_shufflevector)
#define PAIR(i) \
  __builtin_shufflevector(load(from + lane[i]), load(from + lane[i + 4]), 0, 1, 2, 3, 4, 5, 6, 7)
INLINE void store_eight(float *to, eight x) { memcpy(to, &x, sizeof x); }
INLINE void transpose_eight(const float *from, const long *lane, float *to, long width) {
  eight a = PAIR(0), b = PAIR(1), c = PAIR(2), d = PAIR(3);
  eight ab = __builtin_shufflevector(a, b, 0, 8, 1, 9, 4, 12, 5, 13);
  eight cd = __builtin_shufflevector(c, d, 0, 8, 1, 9, 4, 12, 5, 13);
  store_eight(to, __builtin_shufflevector(ab, cd, 0, 1, 8, 9, 4, 5, 12, 13));
  store_eight(to + width, __builtin_shufflevector(ab, cd, 2, 3, 10, 11, 6, 7, 14, 15));
  ab = __builtin_shufflevector(a, b, 2, 10, 3, 11, 6, 14, 7, 15);
  cd = __builtin_shufflevector(c, d, 2, 10, 3, 11, 6, 14, 7, 15);
  store_eight(to + 2 * width, __builtin_shufflevector(ab, cd, 0, 1, 8, 9, 4, 5, 12, 13));
  store_eight(to + 3 * width, __builtin_shufflevector(ab, cd, 2, 3, 10, 11, 6, 7, 14, 15));
}
#else
INLINE void transpose_eight(const float *from, const long *lane, float *to, long width) {
  transpose_four(from, lane, to, width);
  transpose_four(from, lane + 4, to + 4, width);
}
#endif

INLINE long run_length(const long *lane, long most) {
  long n = 1;
  while (n < most && lane[n] == lane[0] + n) n++;
  return n;
}

/* Pack 4 or 8 lanes: transposed by fours where the depth is contiguous in memory. */
INLINE void pack_lanes(int lanes, long depth, const float *from, const long *lane,
                       const long *step, int is_contiguous, float *to, long width) {
  for (long k = 0; k < depth;) {
    if (k + 4 <= depth && (is_contiguous || run_length(step + k, 4) == 4)) {
      if (lanes == 8) transpose_eight(from + step[k], lane, to + k * width, width);
      else transpose_four(from + step[k], lane, to + k * width, width);
      k += 4;
    } else {
      for (int x = 0; x < lanes; x++) to[k * width + x] = from[lane[x] + step[k]];
      k++;
    }
  }
}

/* Pack lanes that are contiguous in memory. */
INLINE void pack_run(long count, long depth, const float *from, const long *step, float *to,
                     long width) {
  for (long k = 0; k < depth; k++)
    if (count == COLUMNS) memcpy(to + k * width, from + step[k], COLUMNS * sizeof(float));
    else copy_floats(count, from + step[k], to + k * width);
}

INLINE int is_contiguous(const long *at, long count) {
  return count && at[count - 1] == at[0] + count - 1 && run_length(at, count) == count;
}

/* Pack a panel. */
INLINE void pack(long lanes, long depth, const float *from, const long *lane, const long *step,
                 int is_contiguous, float *to, long width) {
  for (long x = 0; x < lanes;) {
    long run = run_length(lane + x, lanes - x);
    if (run >= 4 || lanes < 4 || (run > 1 && lanes - x < 4))
      pack_run(run, depth, from + lane[x], step, to + x, width), x += run;
    else if (x + 8 <= lanes)
      pack_lanes(8, depth, from, lane + x, step, is_contiguous, to + x, width), x += 8;
    else { /* the last four may overlap those before */
      x = smaller(x, lanes - 4);
      pack_lanes(4, depth, from, lane + x, step, is_contiguous, to + x, width), x += 4;
    }
  }
}

/* Lanes that no column has are zero: nobody reads their products, but numbers too small for the
   processor to multiply fast must not be among them. */
INLINE void clear(long lanes, long depth, float *packed) {
  long end = lanes <= LANES ? LANES : COLUMNS;
  for (long k = 0; k < depth; k++)
    for (long x = lanes; x < end; x++) packed[k * COLUMNS + x] = 0;
}

/* A block of the product: where it begins, its size, and its operands, packed or in place. */
struct block {
  long row, rows, column, columns, depth_at, depth;
  int is_begun, is_last;
  int is_a_contiguous, is_b_contiguous; /* over the depth */
  int is_a_in_place, is_b_near;         /* `a` isn't packed; b is small enough for that, too */
  const long *packed_row_depth, *packed_column_depth; /* k * ROWS, k * COLUMNS */
  float *a, *b;                                       /* packed */
};

/* c = fma(beta, addend, alpha * c), for a tile */
static void finish(const struct product *p, long row, long rows, long column, long columns,
                   float *c, const long *c_row) {
  float alpha = p->alpha, beta = p->beta;
  for (long i = 0; i < rows; i++) {
    float *to = c + c_row[i];
    long at = (row + i) * p->addend_row + column * p->addend_column;
    for (long j = 0; !p->addend && j < columns; j++) to[j] = alpha * to[j];
    for (long j = 0; p->addend && j < columns; j++)
      to[j] = fma32(beta, p->addend[at + j * p->addend_column], alpha * to[j]);
  }
}

/* Copy a tile from c to `own`, or back: transposed by fours where rows lie one behind the other. */
static void exchange(float *c, const long *c_row, const long *c_column, float *own,
                     const long *own_row, long rows, long columns, int is_back) {
  int are_rows_contiguous = rows >= 4 && is_contiguous(c_row, rows);
  for (long j = 0, run; j < columns; j += run) {
    const long *at = c_column + j;
    run = 1;
    if (at[0] == NOWHERE) continue;
    long step = j + 4 <= columns ? at[1] - at[0] : 0;
    if (are_rows_contiguous && step > 1 && at[2] == at[1] + step && at[3] == at[2] + step) {
      run = 4;
      for (long n = 0; n < rows; n += 4) {
        long i = smaller(n, rows - 4); /* the last four may overlap those before */
        if (is_back) transpose_four(own + j, own_row + i, c + at[0] + c_row[i], step);
        else transpose_four(c + c_row[i], at, own + own_row[i] + j, COLUMNS);
      }
      continue;
    }
    run = run_length(at, columns - j);
    int are_apart = run == 1;
    while (are_apart && j + run < columns && at[run] > at[run - 1] + 1) run++;
    for (long i = 0; i < rows; i++) {
      float *there = c + c_row[i], *here = own + own_row[i] + j;
      for (long x = 0; are_apart && x < run; x++)
        if (is_back) there[at[x]] = here[x];
        else here[x] = there[at[x]];
      if (!are_apart && is_back) copy_floats(run, here, there + at[0]);
      else if (!are_apart) copy_floats(run, there + at[0], here);
    }
  }
}

/* Compute a tile in c; or, where its columns don't lie one behind the other, in a copy. */
static void compute(const struct product *p, const struct block *block, long row, long rows,
                    long column, long columns, int is_contiguous, const float *a,
                    const long *a_row, const long *a_depth, const float *b, const long *b_depth) {
  float own[ROWS * COLUMNS] __attribute__((aligned(64)));
  const long *c_row = p->c_row + row, *c_column = p->c_column + column;
  const long *own_row = block->packed_column_depth; /* the same: i * COLUMNS */
  int must_finish = block->is_last && (p->addend || p->alpha != 1);
  tile_function run_tile = tiles[rows - 1][a_row != 0][columns > LANES];
  float *c = is_contiguous ? p->c + c_column[0] : own;
  const long *row_at = is_contiguous ? c_row : own_row;
  if (block->is_begun && !is_contiguous) {
    memset(own, 0, sizeof own);
    exchange(p->c, c_row, c_column, own, own_row, rows, columns, 0);
  }
  run_tile(block->depth, a, a_row, a_depth, b, b_depth, c, row_at, block->is_begun);
  if (must_finish) finish(p, row, rows, column, columns, c, row_at);
  if (!is_contiguous) exchange(p->c, c_row, c_column, own, own_row, rows, columns, 1);
}

/* Where the i-th tile of a block begins: tiles are as equal in size as they can be. */
INLINE long tile_at(const struct block *block, long i) {
  return i * block->rows / ((block->rows + ROWS - 1) / ROWS);
}

/* Compute the columns of one panel, for all rows of a block. */
static void compute_panel(const struct product *p, const struct block *block, long at) {
  long column = block->column + at, columns = smaller(COLUMNS, block->columns - at);
  const long *b_column = p->b_column + column, *b_depth = p->b_depth + block->depth_at;
  int is_whole = columns == COLUMNS || columns == LANES;
  int is_direct = is_whole && is_contiguous(p->c_column + column, columns);
  const float *b = p->b + b_column[0];
  if (!is_whole || !(block->is_b_near || p->rows <= FEW_ROWS) || !is_contiguous(b_column, columns)) {
    float *packed = block->b + at * block->depth;
    if (block->row == 0) {
      pack(columns, block->depth, p->b, b_column, b_depth, block->is_b_contiguous, packed,
           COLUMNS);
      if (!is_whole) clear(columns, block->depth, packed);
    }
    b = packed, b_depth = block->packed_column_depth;
  }
  for (long i = 0, from = 0; from < block->rows; from = tile_at(block, ++i)) {
    const float *a = block->a + i * ROWS * block->depth;
    const long *a_row = 0, *a_depth = block->packed_row_depth;
    if (block->is_a_in_place)
      a = p->a, a_row = p->a_row + block->row + from, a_depth = p->a_depth + block->depth_at;
    compute(p, block, block->row + from, tile_at(block, i + 1) - from, column, columns, is_direct,
            a, a_row, a_depth, b, b_depth);
  }
}

/* Whether packing would cost more than it brings: the operand fits the processor's first cache. */
INLINE int is_near(const long *depth_table, long depth) {
  return depth > 0 && depth_table[depth - 1] - depth_table[0] < 4096;
}

/* Whether a is read in place: for few columns, unless its depth lies apart, or the rows of a tile would
   take the same few places in the processor's first cache. */
static int can_stay(const struct block *block, const long *a_row, const long *a_depth) {
  if (is_contiguous(a_row, block->rows)) return is_near(a_depth, block->depth);
  int is_apart = block->depth > 1 && a_depth[1] - a_depth[0] != 1;
  return block->columns <= FEW_COLUMNS && block->rows > 1 && !is_apart &&
         (a_row[1] - a_row[0]) % 512 != 0;
}

/* Compute one block. */
static void compute_block(const struct product *p, struct block *block) {
  const long *a_row = p->a_row + block->row, *a_depth = p->a_depth + block->depth_at;
  const long *b_depth = p->b_depth + block->depth_at;
  block->is_a_contiguous = is_contiguous(a_depth, block->depth);
  block->is_b_contiguous = is_contiguous(b_depth, block->depth);
  block->is_b_near = is_near(b_depth, block->depth);
  block->is_a_in_place = block->columns <= COLUMNS || can_stay(block, a_row, a_depth);
  for (long i = 0, from = 0; from < block->rows && !block->is_a_in_place;
       from = tile_at(block, ++i))
    pack(tile_at(block, i + 1) - from, block->depth, p->a, a_row + from, a_depth,
         block->is_a_contiguous, block->a + i * ROWS * block->depth, ROWS);
  for (long at = 0; at < block->columns; at += COLUMNS) compute_panel(p, block, at);
}

#define TABLES (DEPTH_BLOCK * (ROW_BLOCK + COLUMN_BLOCK)) /* behind the panels */

void prepare(long depth, float *scratch) {
  long *by_rows = (long *)(scratch + TABLES), *by_columns = by_rows + DEPTH_BLOCK;
  strided(smaller(DEPTH_BLOCK, depth), ROWS, by_rows);
  strided(smaller(DEPTH_BLOCK, larger(depth, ROWS)), COLUMNS, by_columns);
}

void multiply(const struct product *p, float *scratch) {
  struct block block = {.a = scratch, .b = scratch + DEPTH_BLOCK * ROW_BLOCK};
  block.packed_row_depth = (long *)(scratch + TABLES);
  block.packed_column_depth = block.packed_row_depth + DEPTH_BLOCK;
  for (block.column = 0; block.column < p->columns; block.column += COLUMN_BLOCK) {
    block.columns = smaller(COLUMN_BLOCK, p->columns - block.column);
    block.depth_at = 0;
    do {
      long left = p->depth - block.depth_at, blocks = (left + DEPTH_BLOCK - 1) / DEPTH_BLOCK;
      block.depth = blocks ? (left + blocks - 1) / blocks : 0; /* as equal as they can be */
      block.is_begun = p->is_begun || block.depth_at > 0;
      block.is_last = !p->is_partial && block.depth_at + block.depth == p->depth;
      for (block.row = 0; block.row < p->rows; block.row += ROW_BLOCK) {
        block.rows = smaller(ROW_BLOCK, p->rows - block.row);
        compute_block(p, &block);
      }
      block.depth_at += block.depth;
    } while (block.depth_at < p->depth);
  }
}

void multiply_strided(struct product *p, const long a[2], const long b[2], long c_row,
                      float *scratch) {
  long *table = (long *)(scratch + MULTIPLY_SCRATCH);
  p->a_row = table, table = (long *)strided(p->rows, a[0], table);
  p->a_depth = table, table = (long *)strided(p->depth, a[1], table);
  p->b_depth = table, table = (long *)strided(p->depth, b[0], table);
  p->b_column = table, table = (long *)strided(p->columns, b[1], table);
  p->c_row = table, table = (long *)strided(p->rows, c_row, table);
  p->c_column = table, strided(p->columns, 1, table);
  prepare(p->depth, scratch);
  multiply(p, scratch);
}

/* Products of a batch; strides are of (batch, row or depth, depth or column). */
struct matrices {
  long batch, rows, columns, depth;
  long a[3], b[3], addend[3];
  long is_one; /* all products of the batch are added to one: its chains run over (batch, depth) */
};

/* c = fma(beta, addend, alpha * a b), contiguous; `addend` may be null. `scratch` has
   MULTIPLY_SCRATCH + 4 * (rows + columns + depth) floats. */
PORTABLE void multiply_matrices(const struct matrices *m, const float *a, const float *b,
                                const float *addend, float *c, float alpha, float beta,
                                float *scratch) {
  struct product p = {.rows = m->rows, .columns = m->columns, .depth = m->depth, .alpha = alpha,
                      .beta = beta, .addend_row = m->addend[1], .addend_column = m->addend[2]};
  for (long i = 0; i < m->batch; i++) {
    p.a = a + i * m->a[0], p.b = b + i * m->b[0];
    p.c = c + (m->is_one ? 0 : i * m->rows * m->columns);
    p.addend = addend ? addend + i * m->addend[0] : 0;
    p.is_begun = m->is_one && i > 0, p.is_partial = m->is_one && i + 1 < m->batch;
    if (i) multiply(&p, scratch);
    else multiply_strided(&p, m->a + 1, m->b + 1, m->columns, scratch);
  }
}
