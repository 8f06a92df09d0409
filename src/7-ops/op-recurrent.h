/* ========================================================================== */
/* >>op-recurrent                              MARK: - op-recurrent (private) */
/* One layer of an LSTM or GRU, in one direction, over a whole sequence.      */
/* Needs: >>op-matmul >>op-cell.                                              */
/* ========================================================================== */

/* x is (steps, batch, in) or, with batch_first, (batch, steps, in); a row is one sample at one time
 * step. W_ih x is computed for all rows by one product before the recurrence, and the gradients of
 * x and of both weights by one product each after it. Between these, each time step computes
 * W_hh h', where h' is the h of the step before, and the gates (>>op-cell): threads divide the
 * units among them, and wait for each other once per step. W_hh is packed once, in the form of the
 * built-in kernels, so a user's gemm does not compute these products.
 *
 * Where the units are sharded (W_ih and W_hh by rows, the gates of a unit together), every rank
 * needs all of h' for its own rows of W_hh: an all-gather per step. In backward, every rank gathers
 * W_hh once, and then the gradients of all gates per step, so that it computes the gradient of its
 * own units of h' by the same sum as a single rank would. */
typedef struct tshi_recurrent {
    const tshi_cell_kind *kind;
    int reverse; /* 1: from the last time step to the first */
    int batch_first;
    int cut; /* 1: the units are sharded over several ranks */
} tshi_recurrent;

/* Indices of the op's inputs, and their number. */
enum {
    TSHI_RECURRENT_X,
    TSHI_RECURRENT_W_IH,
    TSHI_RECURRENT_W_HH,
    TSHI_RECURRENT_B_IH,
    TSHI_RECURRENT_B_HH,
    TSHI_RECURRENT_H0,
    TSHI_RECURRENT_C0,
    TSHI_RECURRENT_INPUTS
};

/* A layer while it runs on this rank. Arrays are dense. */
typedef struct tshi_sequence {
    tsh_ctx *ctx;
    tshi_recurrent how;
    int64_t steps, batch, in; /* shape of x, this rank's shard */
    int64_t units, hidden;    /* number of units on this rank; on all ranks together */
    int64_t along_t, along_b; /* the row of sample b at step t is t along_t + b along_b */
    int64_t wide;             /* units, rounded up to a multiple of nr, the width of a tile */
    tsh_real *gates;          /* gates of all rows, (rows, TSHI_CELL_PLANES, units) */
    tsh_real *cells;          /* LSTM: cell state c of all rows, (rows, units) */
    tsh_real *h;              /* h of all rows, (rows, units) */
    const tsh_real *h0, *c0;  /* initial h and c, (batch, units); NULL: 0 */
    const tsh_real *bias;     /* GRU: b_hh of the last gate, (units); NULL: 0 */
    tsh_real *packed;         /* W_hh, packed as one matrix B per gate */
    tsh_real *strips;         /* per piece: h' or gradients of a gate, (batch, hidden), packed */
    int64_t tall;             /* batch, rounded up to a multiple of mr, the height of a tile */
    tsh_real *sum;            /* products by W_hh, (batch, gates, wide); in backward (batch,
                               * wide) */
    tsh_real *carry;          /* backward, (batch, units): see tshi_cell */
    tsh_real *own, *whole;    /* what an all-gather sends and receives; NULL: units not sharded */
    int64_t *counts;          /* number of units of each rank */
    const tsh_real *dy;       /* backward: gradient of h at all steps, (rows, units); NULL: 0 */
    const tsh_real *dh;       /* backward: gradient of the last h, (batch, units); NULL: 0 */
    int64_t k;                /* number of the time step that is computed, in order of time or, if
                               * reversed, against it */
} tshi_sequence;

/* Returns the row of sample 0 at time step number k, counted in the order of computation. */
static int64_t tshi_recurrent_row(const tshi_sequence *s, int64_t k) {
    return (s->how.reverse ? s->steps - 1 - k : k) * s->along_t;
}

/* Fills in the fields of *s that follow from the shapes and options. */
static void tshi_recurrent_begin(tshi_sequence *s, const tshi_recurrent *how, const tsh_tensor *x,
                                 const tsh_tensor *w_hh) {
    const int64_t nr = x->ctx->gemm_kernel->nr, mr = x->ctx->gemm_kernel->mr;
    memset(s, 0, sizeof *s);
    s->ctx = x->ctx;
    s->how = *how;
    s->steps = x->local[how->batch_first];
    s->batch = x->local[!how->batch_first];
    s->in = x->local[2];
    s->hidden = w_hh->dim[1];
    s->units = w_hh->local[0] / how->kind->gates;
    s->along_t = how->batch_first ? 1 : s->batch;
    s->along_b = how->batch_first ? s->steps : 1;
    s->wide = tshi_base_ceil(s->units, nr) * nr;
    s->tall = tshi_base_ceil(s->batch, mr) * mr;
}

/* Allocates the scratch memory of forward or, with back 1, of backward. Returns its block, which
 * the caller releases; NULL: no memory. */
static tshi_block *tshi_recurrent_room(tshi_sequence *s, int back) {
    const int64_t gates = s->how.kind->gates, each = TSHI_CELL_PLANES;
    const int64_t packed = gates * s->wide * s->hidden;
    const int64_t sum = s->batch * (back ? 1 : gates) * s->wide;
    const int64_t carry = back ? s->batch * s->units : 0;
    const int64_t own = s->how.cut ? s->batch * each * s->units : 0;
    const int64_t whole = s->how.cut ? s->batch * each * s->hidden : 0;
    const size_t ranks = (size_t)s->ctx->tp.size * sizeof(int64_t);
    const int64_t strips = s->ctx->threads * s->tall * s->hidden;
    const size_t reals = tshi_dtype_reals(packed + strips + sum + carry + own + whole);
    tshi_block *block = tshi_mem_alloc(s->ctx, TSH_MEM_STEP, ranks + reals);
    if (!block) return NULL;
    s->counts = (int64_t *)tshi_mem_data(block);
    s->packed = (tsh_real *)(void *)(s->counts + s->ctx->tp.size);
    s->strips = s->packed + packed;
    s->sum = s->strips + strips;
    s->carry = s->sum + sum;
    s->own = s->carry + carry;
    s->whole = s->own + own;
    return block;
}

/* All-gathers `blocks` blocks of numbers: a block has one per unit of this rank in s->own, and one
 * per unit of all ranks in s->whole. */
static void tshi_recurrent_gather(const tshi_sequence *s, int64_t blocks) {
    (void)tshi_error_comm(s->ctx,
                          tsh_allgather(&s->ctx->tp, s->own, s->whole, s->counts, blocks, TSH_REAL),
                          "an all-gather of a layer whose units are sharded");
}

/* Packs a matrix A, of shape (batch, hidden), in the memory of one piece, for its products; returns
 * the packed matrix. */
static tshi_matmul_strips tshi_recurrent_strips(const tshi_sequence *s, int piece, tshi_matrix a) {
    const tshi_gemm_kernel *kernel = s->ctx->gemm_kernel;
    tsh_real *to = s->strips + piece * s->tall * s->hidden;
    const tshi_matmul_strips strips = {to, 1, kernel->mr, s->hidden};
    tshi_matmul_pack(kernel, to, kernel->mr, s->batch, s->hidden, kernel->mr * s->hidden, a,
                     TSHI_GEMM_REALS);
    return strips;
}

/* Computes columns [from, to) of C = A W, plus C if `add` is 1, for all samples; W is matrix number
 * `gate` of s->packed. Shapes: A (batch, hidden), C (batch, units), with row stride `row`. */
static void tshi_recurrent_product(const tshi_sequence *s, tshi_matmul_strips a, int gate, int add,
                                   tsh_real *c, int64_t row, int64_t from, int64_t to) {
    const tshi_gemm_kernel *kernel = s->ctx->gemm_kernel;
    const tshi_matmul_stairs all = {TSHI_MATMUL_ALL, TSHI_MATMUL_ALL};
    /* from is a multiple of nr, the width of a sliver */
    const tsh_real *at = s->packed + (gate * s->wide + from) * s->hidden;
    const tshi_matmul_slivers b = {at, kernel->nr, kernel->nr * s->hidden, TSHI_GEMM_REALS};
    const char *const line = (const char *)at;
    tshi_gemm_walk none = {line, line, line, 0, 0, 0}; /* nothing more to prefetch */
    tshi_matmul_tiles(kernel, s->batch, to - from, s->hidden, 1, a, b, add,
                      tshi_gemm_matrix(c + from, row, 1), all, &none);
}

/* Runs fn for all units of this rank; threads divide the units among them. */
static void tshi_recurrent_team(tshi_sequence *s, tshi_team_fn fn) {
    enum { MIN_WORK = 1 << 18 }; /* least number of multiply-adds per thread */
    const int nr = s->ctx->gemm_kernel->nr;
    const int64_t work = s->batch * s->units * s->hidden * s->how.kind->gates;
    const int pieces = (int)tshi_base_min(tshi_team_parts(s->ctx, work, MIN_WORK), s->wide / nr);
    if (s->units && s->batch) tshi_team_run(s->ctx, pieces, s->units, nr, fn, s);
}

/* Returns the operands of the LSTM or GRU cell at time step k for units [from, to). */
static tshi_cell tshi_recurrent_cell(const tshi_sequence *s, int64_t k, int64_t from, int64_t to) {
    const int64_t row = tshi_recurrent_row(s, k), at = row * s->units + from;
    const tsh_real *values = s->how.kind->lstm ? s->cells : s->h;
    const tsh_real *first = s->how.kind->lstm ? s->c0 : s->h0;
    tshi_cell cell;
    memset(&cell, 0, sizeof cell);
    cell.units = to - from;
    cell.gate = s->gates + row * TSHI_CELL_PLANES * s->units + from;
    cell.gate_plane = s->units;
    cell.gate_row = s->along_b * TSHI_CELL_PLANES * s->units;
    cell.before = k       ? values + tshi_recurrent_row(s, k - 1) * s->units + from
                  : first ? first + from
                          : NULL;
    cell.before_row = k ? s->along_b * s->units : s->units;
    cell.cell = s->cells ? s->cells + at : NULL;
    cell.out = s->h + at;
    cell.out_row = cell.dy_row = s->along_b * s->units;
    cell.bias = s->bias ? s->bias + from : NULL;
    return cell;
}

/* -- forward ------------------------------------------------------------------ */

/* A tshi_team_fn: computes units [from, to) of time step s->k. */
static void tshi_recurrent_step(void *job, int piece, int64_t from, int64_t to) {
    const tshi_sequence *s = (const tshi_sequence *)job;
    const int gates = s->how.kind->gates;
    const int64_t row = gates * s->wide; /* row stride of s->sum */
    tshi_cell cell = tshi_recurrent_cell(s, s->k, from, to);
    tshi_matrix h = tshi_gemm_matrix(s->whole, s->hidden, 1); /* h', shape (batch, hidden) */
    tshi_matmul_strips strips = {NULL, 0, 0, 0};
    const int known = s->k > 0 || s->h0; /* 0: h', of the step before, is 0 */
    if (!s->how.cut && s->k > 0)
        h = tshi_gemm_matrix(s->h + tshi_recurrent_row(s, s->k - 1) * s->units,
                             s->along_b * s->units, 1);
    else if (!s->how.cut)
        h.data = tshi_kernel_unconst(s->h0);
    if (known) strips = tshi_recurrent_strips(s, piece, h);
    for (int g = 0; g < gates; g++) {
        if (known) tshi_recurrent_product(s, strips, g, 0, s->sum + g * s->wide, row, from, to);
        for (int64_t b = 0; b < s->batch && !known; b++)
            memset(s->sum + b * row + g * s->wide + from, 0, (size_t)(to - from) * sizeof *s->sum);
    }
    cell.sum = s->sum + from;
    cell.sum_plane = s->wide;
    cell.sum_row = row;
    s->how.kind->step[s->ctx->isa](s->batch, NULL, &cell);
}

/* Copies this rank's numbers of a time step to s->own, and all-gathers them to s->whole. For each
 * sample, `from` has `planes` blocks of one number per unit; samples are `step` apart. */
static void tshi_recurrent_share(const tshi_sequence *s, const tsh_real *from, int64_t step,
                                 int64_t planes) {
    const int64_t n = planes * s->units;
    for (int64_t b = 0; b < s->batch; b++)
        memcpy(s->own + b * n, from + b * step, (size_t)n * sizeof *from);
    if (s->batch) tshi_recurrent_gather(s, s->batch * planes);
}

/* Computes h, and c, of all time steps from s->gates, which has W_ih x and the biases. */
static void tshi_recurrent_steps(tshi_sequence *s) {
    if (s->how.cut && s->h0) tshi_recurrent_share(s, s->h0, s->units, 1);
    for (s->k = 0; s->k < s->steps && s->ctx->error.code == TSH_OK; s->k++) {
        tshi_recurrent_team(s, tshi_recurrent_step);
        tshi_tape_progress(s->ctx);
        if (s->how.cut && s->k + 1 < s->steps)
            tshi_recurrent_share(s, s->h + tshi_recurrent_row(s, s->k) * s->units,
                                 s->along_b * s->units, 1);
    }
}

/* Returns `data`, the values of t, as a matrix with a row per row of t. */
static tshi_matrix tshi_recurrent_matrix(const tsh_tensor *t, void *data, tsh_dtype dtype) {
    int64_t rows, step;
    (void)tshi_kernel_rows(t, &rows, &step);
    return tshi_gemm_matrix_of(data, dtype, step, t->stride[t->ndim - 1]);
}

/* Computes the part of the gates that does not depend on the recurrence, W_ih x and the biases, for
 * all rows in one product; packs W_hh. bias: scratch, shape (TSHI_CELL_PLANES, units). */
static void tshi_recurrent_inputs(tshi_sequence *s, tsh_tensor *const *in, tsh_real *bias) {
    const tshi_gemm_kernel *kernel = s->ctx->gemm_kernel;
    const int gates = s->how.kind->gates;
    const int64_t rows = s->steps * s->batch, n = gates * s->units, nr = kernel->nr;
    tsh_tensor *x = in[TSHI_RECURRENT_X], *w = in[TSHI_RECURRENT_W_IH];
    const tsh_tensor *b[] = {in[TSHI_RECURRENT_B_IH], in[TSHI_RECURRENT_B_HH]};
    const tshi_matrix w_hh = tshi_recurrent_matrix(in[TSHI_RECURRENT_W_HH],
                                                   tshi_tensor_at(in[TSHI_RECURRENT_W_HH]),
                                                   in[TSHI_RECURRENT_W_HH]->dtype);
    for (int64_t i = 0; i < n; i++) {
        /* 1: gate u of a GRU, whose b_hh is added later */
        const int apart = !s->how.kind->lstm && i >= 2 * s->units;
        double sum = 0;
        for (int k = 0; k < 2; k++)
            if (b[k] && !(k && apart)) sum += tshi_dtype_get(b[k]->dtype, tshi_tensor_at(b[k]), i);
        bias[i] = TSHI_R(sum);
    }
    for (int64_t i = 0; i < s->units && b[1] && !s->how.kind->lstm; i++)
        bias[n + i] = TSHI_R(tshi_dtype_get(b[1]->dtype, tshi_tensor_at(b[1]), 2 * s->units + i));
    if (b[1] && !s->how.kind->lstm) s->bias = bias + n;
    tshi_matmul_run(s->ctx, rows, n, s->in, 1,
                    tshi_recurrent_matrix(x, tshi_tensor_at(x), x->dtype),
                    tshi_gemm_transposed(tshi_recurrent_matrix(w, tshi_tensor_at(w), w->dtype)),
                    TSHI_R(b[0] || b[1]), tshi_gemm_matrix(bias, 0, 1),
                    tshi_gemm_matrix(s->gates, TSHI_CELL_PLANES * s->units, 1));
    for (int g = 0; g < gates; g++)
        tshi_matmul_pack(kernel, s->packed + g * s->wide * s->hidden, (int)nr, s->units, s->hidden,
                         nr * s->hidden, tshi_gemm_from(w_hh, g * s->units, 0),
                         tshi_gemm_form_of(w_hh, 0));
}

/* Copies the last h or c, of all samples, from `values` (rows, units) to out (1, batch, units). */
static void tshi_recurrent_last(const tshi_sequence *s, const tsh_real *values, tsh_tensor *out) {
    tshi_block *unrounded;
    tsh_real *to = tshi_kernel_output(out, &unrounded);
    const tsh_real *from = values + tshi_recurrent_row(s, s->steps - 1) * s->units;
    for (int64_t b = 0; b < s->batch && to; b++)
        memcpy(to + b * s->units, from + b * s->along_b * s->units, (size_t)s->units * sizeof *to);
    tshi_kernel_output_done(out, unrounded);
}

/* Sets s->counts to the number of units of each rank; layout: that of the output h. */
static void tshi_recurrent_counts(const tshi_sequence *s, const tsh_layout *layout) {
    for (int r = 0; r < s->ctx->tp.size; r++)
        s->counts[r] = tshi_layout_own(layout, s->hidden, &s->ctx->deal, r, NULL);
}

/* Computes out[0], h of all time steps, and out[1] and out[2], the last h and c. Returns the gates
 * and c of all time steps, for backward. NULL: an error. */
static tshi_block *tshi_recurrent_forward(const tshi_recurrent *how, tsh_tensor *const *in,
                                          tsh_tensor *const *out) {
    tshi_sequence s;
    tshi_block *scratch[2] = {NULL, NULL}, *unrounded = NULL, *room, *kept, *bias;
    tshi_recurrent_begin(&s, how, in[TSHI_RECURRENT_X], in[TSHI_RECURRENT_W_HH]);
    const int64_t rows = s.steps * s.batch, planes = TSHI_CELL_PLANES + how->kind->lstm;
    room = tshi_recurrent_room(&s, 0);
    kept = tshi_mem_alloc(s.ctx, TSH_MEM_STEP, tshi_dtype_reals(rows * planes * s.units));
    bias = tshi_mem_alloc(s.ctx, TSH_MEM_STEP, tshi_dtype_reals(TSHI_CELL_PLANES * s.units));
    s.h = tshi_kernel_output(out[0], &unrounded);
    if (in[TSHI_RECURRENT_H0]) s.h0 = tshi_kernel_packed_reals(in[TSHI_RECURRENT_H0], &scratch[0]);
    if (in[TSHI_RECURRENT_C0]) s.c0 = tshi_kernel_packed_reals(in[TSHI_RECURRENT_C0], &scratch[1]);
    if (room && kept && bias && s.ctx->error.code == TSH_OK) {
        s.gates = (tsh_real *)tshi_mem_data(kept);
        if (how->kind->lstm) s.cells = s.gates + rows * TSHI_CELL_PLANES * s.units;
        tshi_recurrent_counts(&s, &out[0]->layout);
        tshi_recurrent_inputs(&s, in, (tsh_real *)tshi_mem_data(bias));
        tshi_recurrent_steps(&s);
        tshi_recurrent_last(&s, s.h, out[1]);
        if (how->kind->lstm) tshi_recurrent_last(&s, s.cells, out[2]);
    }
    tshi_mem_release(s.ctx, scratch[0]);
    tshi_mem_release(s.ctx, scratch[1]);
    tshi_mem_release(s.ctx, bias);
    tshi_mem_release(s.ctx, room);
    tshi_kernel_output_done(out[0], unrounded);
    if (s.ctx->error.code == TSH_OK) return kept;
    tshi_mem_release(s.ctx, kept);
    return NULL;
}

/* -- backward ----------------------------------------------------------------- */

/* Computes, for one piece, units [from, to) of the gradient that h of time step k - 1 gets through
 * W_hh from step k, in s->sum. */
static void tshi_recurrent_through(const tshi_sequence *s, int piece, int64_t k, int64_t from,
                                   int64_t to) {
    const tshi_cell_kind *kind = s->how.kind;
    const int64_t n = TSHI_CELL_PLANES * s->hidden; /* gates per sample, of all ranks */
    const tshi_matrix d = s->how.cut ? tshi_gemm_matrix(s->whole, n, 1)
                                     : tshi_gemm_matrix(s->gates + tshi_recurrent_row(s, k) * n,
                                                        s->along_b * n, 1);
    for (int g = 0; g < kind->gates; g++)
        tshi_recurrent_product(
            s, tshi_recurrent_strips(s, piece, tshi_gemm_from(d, 0, kind->plane[g] * s->hidden)), g,
            g > 0, s->sum, s->wide, from, to);
}

/* A tshi_team_fn: computes the gradients of the gates of time step s->k for units [from, to). */
static void tshi_recurrent_step_back(void *job, int piece, int64_t from, int64_t to) {
    const tshi_sequence *s = (const tshi_sequence *)job;
    tshi_cell cell = tshi_recurrent_cell(s, s->k, from, to);
    const int64_t at = tshi_recurrent_row(s, s->k) * s->units + from;
    const size_t bytes = (size_t)(to - from) * sizeof *s->sum;
    if (s->k + 1 < s->steps) tshi_recurrent_through(s, piece, s->k + 1, from, to);
    for (int64_t b = 0; b < s->batch && s->k + 1 == s->steps; b++) {
        if (s->dh)
            memcpy(s->sum + b * s->wide + from, s->dh + b * s->units + from, bytes);
        else
            memset(s->sum + b * s->wide + from, 0, bytes);
    }
    cell.sum = s->sum + from;
    cell.sum_row = s->wide;
    cell.dy = s->dy ? s->dy + at : NULL;
    cell.carry = s->carry + from;
    cell.carry_row = s->units;
    s->how.kind->back[s->ctx->isa](s->batch, NULL, &cell);
}

/* A tshi_team_fn: computes the gradient of h0 for units [from, to), in s->sum. */
static void tshi_recurrent_first_back(void *job, int piece, int64_t from, int64_t to) {
    const tshi_sequence *s = (const tshi_sequence *)job;
    tshi_recurrent_through(s, piece, 0, from, to);
    for (int64_t b = 0; b < s->batch && !s->how.kind->lstm; b++)
        for (int64_t u = from; u < to; u++) s->sum[b * s->wide + u] += s->carry[b * s->units + u];
}

/* Replaces the gates of all time steps by the gradients of their arguments, what sigmoid or tanh is
 * applied to. first 1: also computes the gradient of h0, in s->sum. */
static void tshi_recurrent_steps_back(tshi_sequence *s, int first) {
    const int64_t n = TSHI_CELL_PLANES * s->units;
    for (s->k = s->steps - 1; s->k >= 0 && s->ctx->error.code == TSH_OK; s->k--) {
        tshi_recurrent_team(s, tshi_recurrent_step_back);
        tshi_tape_progress(s->ctx);
        if (s->how.cut && (s->k > 0 || first))
            tshi_recurrent_share(s, s->gates + tshi_recurrent_row(s, s->k) * n, s->along_b * n,
                                 TSHI_CELL_PLANES);
    }
    if (first && s->ctx->error.code == TSH_OK) tshi_recurrent_team(s, tshi_recurrent_first_back);
}

/* Packs W_hh for backward: for each gate, the columns of this rank's units, which begin at column
 * `start`. w: all rows of W_hh, those of other ranks too. */
static void tshi_recurrent_pack_back(const tshi_sequence *s, tshi_matrix w, int64_t start) {
    const tshi_gemm_kernel *kernel = s->ctx->gemm_kernel;
    const int64_t nr = kernel->nr;
    for (int g = 0; g < s->how.kind->gates; g++) {
        const tshi_matrix part = tshi_gemm_transposed(tshi_gemm_from(w, g * s->hidden, start));
        tshi_matmul_pack(kernel, s->packed + g * s->wide * s->hidden, (int)nr, s->units, s->hidden,
                         nr * s->hidden, part, tshi_gemm_form_of(part, 0));
    }
}

/* All-gathers `blocks` blocks, which have `each` numbers per unit of this rank at `own`, to a new
 * block, with those of the units of all ranks. NULL: no memory. */
static tshi_block *tshi_recurrent_all(const tshi_sequence *s, const tsh_real *own, int64_t blocks,
                                      int64_t each) {
    const size_t ranks = (size_t)s->ctx->tp.size;
    tshi_block *all = tshi_mem_alloc(s->ctx, TSH_MEM_STEP,
                                     tshi_dtype_reals(blocks * s->hidden * each));
    tshi_block *lengths = tshi_mem_alloc(s->ctx, TSH_MEM_STEP, ranks * sizeof(int64_t));
    if (all && lengths) {
        int64_t *counts = (int64_t *)tshi_mem_data(lengths);
        for (size_t r = 0; r < ranks; r++) counts[r] = s->counts[r] * each;
        if (blocks)
            (void)tshi_error_comm(
                s->ctx,
                tsh_allgather(&s->ctx->tp, own, tshi_mem_data(all), counts, blocks, TSH_REAL),
                "an all-gather of a layer whose units are sharded");
    }
    tshi_mem_release(s->ctx, lengths);
    return all;
}

/* Packs W_hh for backward; where the units are sharded, all-gathers its rows first. Returns 0 after
 * an error. */
static int tshi_recurrent_weights_back(const tshi_sequence *s, const tshi_node *node,
                                       const tsh_layout *layout) {
    const tsh_tensor *w = node->in[TSHI_RECURRENT_W_HH];
    void *saved = tshi_tape_saved(node, TSHI_RECURRENT_W_HH);
    tsh_range range[TSH_MAX_SEGMENTS];
    tshi_block *own = NULL, *all;
    int64_t stride[TSH_MAX_DIMS];
    if (!s->how.cut) {
        tshi_recurrent_pack_back(s, tshi_recurrent_matrix(w, saved, w->dtype), 0);
        return 1;
    }
    const tsh_real *rows = tshi_tape_saved_reals(node, TSHI_RECURRENT_W_HH, stride, &own);
    all = rows ? tshi_recurrent_all(s, rows, s->how.kind->gates, s->hidden) : NULL;
    (void)tshi_layout_own(layout, s->hidden, &s->ctx->deal, s->ctx->tp.rank, range);
    if (all && s->ctx->error.code == TSH_OK)
        tshi_recurrent_pack_back(s, tshi_gemm_matrix((tsh_real *)tshi_mem_data(all), s->hidden, 1),
                                 range[0].start);
    tshi_mem_release(s->ctx, all);
    tshi_mem_release(s->ctx, own);
    return s->ctx->error.code == TSH_OK;
}

/* Returns a new block with h' of every row, for all units: h of the step before, or h0. NULL: no
 * memory. */
static tshi_block *tshi_recurrent_before(const tshi_sequence *s) {
    const int64_t rows = s->steps * s->batch;
    const size_t bytes = (size_t)s->units * sizeof *s->h;
    tshi_block *block = tshi_mem_alloc(s->ctx, TSH_MEM_STEP, tshi_dtype_reals(rows * s->units));
    tshi_block *all = block;
    if (!block) return NULL;
    for (int64_t k = 0; k < s->steps; k++)
        for (int64_t b = 0; b < s->batch; b++) {
            tsh_real *to = (tsh_real *)tshi_mem_data(block) +
                           (tshi_recurrent_row(s, k) + b * s->along_b) * s->units;
            const int64_t row = k ? tshi_recurrent_row(s, k - 1) + b * s->along_b : b;
            const tsh_real *from = k ? s->h : s->h0; /* NULL: h0 is 0 */
            if (from)
                memcpy(to, from + row * s->units, bytes);
            else
                memset(to, 0, bytes);
        }
    if (!s->how.cut) return block;
    all = tshi_recurrent_all(s, (const tsh_real *)tshi_mem_data(block), rows, 1);
    tshi_mem_release(s->ctx, block);
    return all;
}

/* Adds the gradients of both biases: sums of the gates' gradients over all rows. */
static void tshi_recurrent_biases_back(const tshi_sequence *s, tshi_node *node) {
    const int64_t n = TSHI_CELL_PLANES * s->units, one = 1;
    tshi_block *block = tshi_mem_alloc(s->ctx, TSH_MEM_STEP, tshi_dtype_reals(2 * n));
    tshi_loop loop;
    tshi_dest dest;
    if (!block) return;
    tsh_real *sum = (tsh_real *)tshi_mem_data(block), *hh = sum + n;
    memset(sum, 0, tshi_dtype_reals(2 * n));
    memset(&loop, 0, sizeof loop);
    loop.ctx = s->ctx;
    loop.ndim = loop.n = 2;
    loop.dim[0] = s->steps * s->batch;
    loop.dim[1] = n;
    loop.x[0] = tshi_kernel_reals(sum, 0);
    loop.x[1] = tshi_kernel_reals(s->gates, 0);
    loop.stride[0][1] = loop.stride[1][1] = 1;
    loop.stride[1][0] = n;
    tshi_kernel_run(&loop, tshi_kernel_add[s->ctx->isa], NULL);
    for (int g = 0; g < s->how.kind->gates; g++)
        memcpy(hh + g * s->units, sum + s->how.kind->plane[g] * s->units,
               (size_t)s->units * sizeof *sum);
    if (tshi_tape_dest(node, TSHI_RECURRENT_B_IH, &dest))
        tshi_tape_accumulate(node->in[TSHI_RECURRENT_B_IH], &dest, sum, &one);
    if (tshi_tape_dest(node, TSHI_RECURRENT_B_HH, &dest))
        tshi_tape_accumulate(node->in[TSHI_RECURRENT_B_HH], &dest, hh, &one);
    tshi_mem_release(s->ctx, block);
}

/* Adds the gradient of W_hh, by one product for each run of gates whose planes are adjacent. d: the
 * gradients of the gates. */
static void tshi_recurrent_hidden_back(const tshi_sequence *s, tshi_node *node, tshi_matrix d) {
    const tshi_cell_kind *kind = s->how.kind;
    tshi_block *before;
    tshi_dest dest;
    if (!tshi_tape_dest(node, TSHI_RECURRENT_W_HH, &dest)) return;
    before = tshi_recurrent_before(s);
    for (int g = 0, end; g < kind->gates && before && s->ctx->error.code == TSH_OK; g = end) {
        const tshi_matrix part = tshi_gemm_from(d, 0, kind->plane[g] * s->units);
        const tshi_matrix to = tshi_gemm_matrix(dest.data, dest.stride[0], dest.stride[1]);
        for (end = g + 1; end < kind->gates && kind->plane[end] == kind->plane[end - 1] + 1;) end++;
        tshi_matmul_gemm(s->ctx, (end - g) * s->units, s->hidden, s->steps * s->batch, 1,
                         tshi_gemm_transposed(part),
                         tshi_gemm_matrix((tsh_real *)tshi_mem_data(before), s->hidden, 1),
                         TSHI_R(dest.add), tshi_gemm_from(to, g * s->units, 0));
    }
    tshi_mem_release(s->ctx, before);
}

/* Adds the gradients of x, of the weights and of the biases. */
static void tshi_recurrent_inputs_back(const tshi_sequence *s, tshi_node *node) {
    const int64_t rows = s->steps * s->batch, n = s->how.kind->gates * s->units;
    const tsh_tensor *x = node->in[TSHI_RECURRENT_X], *w = node->in[TSHI_RECURRENT_W_IH];
    const tshi_matrix d = tshi_gemm_matrix(s->gates, TSHI_CELL_PLANES * s->units, 1);
    const tshi_matrix mx = tshi_recurrent_matrix(x, tshi_tape_saved(node, TSHI_RECURRENT_X),
                                                 x->dtype);
    tshi_dest dest;
    if (tshi_tape_dest(node, TSHI_RECURRENT_X, &dest))
        tshi_matmul_gemm(
            s->ctx, rows, s->in, n, 1, d,
            tshi_recurrent_matrix(w, tshi_tape_saved(node, TSHI_RECURRENT_W_IH), w->dtype),
            TSHI_R(dest.add), tshi_gemm_matrix(dest.data, mx.row, mx.column));
    tshi_tape_input_done(node, TSHI_RECURRENT_X); /* dx may be all-reduced meanwhile */
    if (tshi_tape_dest(node, TSHI_RECURRENT_W_IH, &dest))
        tshi_matmul_gemm(s->ctx, n, s->in, rows, 1, tshi_gemm_transposed(d), mx, TSHI_R(dest.add),
                         tshi_gemm_matrix(dest.data, dest.stride[0], dest.stride[1]));
    tshi_recurrent_hidden_back(s, node, d);
    if (node->in[TSHI_RECURRENT_B_IH]) tshi_recurrent_biases_back(s, node);
}

/* Returns the gradient of an output of the node; NULL: it has none. */
static const tsh_real *tshi_recurrent_grad(const tsh_tensor *out) {
    return out->gr.live ? (const tsh_real *)tshi_mem_data(out->gr.block) : NULL;
}

/* Backward of tsh_lstm and tsh_gru. Overwrites the gates that forward kept in the node's aux. */
static void tshi_recurrent_backward(tshi_node *node) {
    const tshi_recurrent *how = (const tshi_recurrent *)node->params;
    tsh_tensor *h0 = node->in[TSHI_RECURRENT_H0], *c0 = node->in[TSHI_RECURRENT_C0];
    tshi_block *saved[3] = {NULL, NULL, NULL}, *room;
    tshi_sequence s;
    tshi_dest dest;
    int64_t stride[TSH_MAX_DIMS];
    tshi_recurrent_begin(&s, how, node->in[TSHI_RECURRENT_X], node->in[TSHI_RECURRENT_W_HH]);
    room = tshi_recurrent_room(&s, 1);
    s.gates = (tsh_real *)tshi_mem_data(node->aux);
    if (how->kind->lstm) s.cells = s.gates + s.steps * s.batch * TSHI_CELL_PLANES * s.units;
    s.h = tshi_tape_saved_reals(node, node->n, stride, &saved[0]);
    if (h0) s.h0 = tshi_tape_saved_reals(node, TSHI_RECURRENT_H0, stride, &saved[1]);
    if (c0) s.c0 = tshi_tape_saved_reals(node, TSHI_RECURRENT_C0, stride, &saved[2]);
    s.dy = tshi_recurrent_grad(node->out);
    s.dh = tshi_recurrent_grad(node->more[0]);
    if (room) tshi_recurrent_counts(&s, &node->out->layout);
    if (room && s.ctx->error.code == TSH_OK &&
        tshi_recurrent_weights_back(&s, node, &node->out->layout)) {
        const tsh_real *dc = how->kind->lstm ? tshi_recurrent_grad(node->more[1]) : NULL;
        const size_t bytes = tshi_dtype_reals(s.batch * s.units);
        const int64_t rows[3] = {0, s.wide, 1}, dense[3] = {0, s.units, 1};
        memset(s.carry, 0, bytes);
        if (dc) memcpy(s.carry, dc, bytes);
        tshi_recurrent_steps_back(&s, h0 && h0->base->requires_grad);
        if (s.ctx->error.code == TSH_OK && tshi_tape_dest(node, TSHI_RECURRENT_H0, &dest))
            tshi_tape_accumulate(h0, &dest, s.sum, rows);
        if (s.ctx->error.code == TSH_OK && tshi_tape_dest(node, TSHI_RECURRENT_C0, &dest))
            tshi_tape_accumulate(c0, &dest, s.carry, dense);
        if (s.ctx->error.code == TSH_OK) tshi_recurrent_inputs_back(&s, node);
    }
    for (int i = 0; i < 3; i++) tshi_mem_release(s.ctx, saved[i]);
    tshi_mem_release(s.ctx, room);
}
