/* ========================================================================== */
/* >>op-dropout                                  MARK: - op-dropout (private) */
/* Dropout: which elements become 0 does not depend on the layout.            */
/* Masks depend on the seed, the module and each element's global index.      */
/* Needs: >>op.                                                               */
/* ========================================================================== */

/* -- dropout ----------------------------------------------------------------
 * y_e = x_e / (1 - p) if bits(key, stream, e) >= p 2^32, else 0, where e is the global index of the
 * element and bits(...) its random word of 32 bits: the mask is the same however x is sharded.
 * Backward computes the mask again. */

/* A dropout mask: element e is kept or not depending on key, stream and e only. */
typedef struct tshi_dropout {
    uint64_t key, stream; /* key and stream of the random generator Philox */
    double p;             /* probability that an element becomes 0 */
} tshi_dropout;

/* The parameters of the dropout kernel, which handles adjacent elements: y = dropout of x. */
typedef struct tshi_dropout_run {
    const tshi_dropout *mask; /* which elements become 0 */
    const tsh_real *x;        /* this rank's values, dense */
    tsh_real *y;              /* where this rank's results go; may be x */
    int isa;                  /* which kernel runs: TSHI_ISA_... */
    int64_t first;            /* global index of the first element of a call of the kernel */
} tshi_dropout_run;

/* Returns the next mask of owner, the module that applies dropout. Its stream is a hash of owner's
 * path, the number of masks that owner has drawn, and the dp rank. owner NULL: a hash of the number
 * of masks that this ctx has drawn, the pp rank (each pipeline stage counts for itself) and the dp
 * rank. */
static tshi_dropout tshi_dropout_next_mask(tsh_ctx *ctx, double p, tsh_module *owner) {
    const uint64_t count = owner ? owner->dropout_calls++ : ctx->dropout_calls++;
    tshi_dropout mask = {ctx->seed, tshi_rng_hash(count, "dropout", 7), p};
    if (owner) mask.stream = tshi_rng_hash(mask.stream, owner->path, strlen(owner->path));
    if (!owner && ctx->pp.rank)
        mask.stream = tshi_rng_hash(mask.stream, &ctx->pp.rank, sizeof ctx->pp.rank);
    mask.stream = tshi_rng_hash(mask.stream, &ctx->dp.rank, sizeof ctx->dp.rank);
    return mask;
}

enum { TSHI_DROPOUT_DRAW = 32 }; /* random words that the x86 kernels draw at a time */

#if TSHI_X86
/* Defines a function that draws TSHI_DROPOUT_DRAW words as tshi_rng_words does, with Philox's
 * 32-bit counters in 64-bit lanes, whose upper halves are ignored: each of Philox's products is
 * then one instruction, which compilers do not find by themselves. The order of the lanes is such
 * that unpacking puts the words in the order of tshi_rng_words. bytes: size of a vector; reg: its
 * type; op: calls an intrinsic by name; last, the lanes' order. */
#define TSHI_DROPOUT_WORDS(isa, TARGET, bytes, reg, op, ...)                                       \
    typedef uint64_t tshi_dropout_##isa __attribute__((vector_size(bytes), may_alias));            \
    TARGET TSHI_INLINE void tshi_dropout_words_##isa(uint64_t key, uint64_t stream,                \
                                                     uint64_t position, uint32_t *word) {          \
        const tshi_dropout_##isa zero = {0}, lanes = {__VA_ARGS__};                                \
        const tshi_dropout_##isa m0 = zero + 0xD2511F53u, m1 = zero + 0xCD9E8D57u;                 \
        int i, r;                                                                                  \
        for (i = 0; i < TSHI_DROPOUT_DRAW; i += (bytes) / 2) {                                     \
            tshi_dropout_##isa c0 = lanes + (position + (uint64_t)i / 4), c1 = c0 >> 32, a, b;     \
            tshi_dropout_##isa c2 = zero + stream, c3 = c2 >> 32, k0 = zero + key, k1 = k0 >> 32;  \
            for (r = 0; r < 10; r++) { /* Philox's rounds */                                       \
                a = (tshi_dropout_##isa)op(mul_epu32, (reg)c0, (reg)m0);                           \
                b = (tshi_dropout_##isa)op(mul_epu32, (reg)c2, (reg)m1);                           \
                c0 = (b >> 32) ^ c1 ^ k0;                                                          \
                c2 = (a >> 32) ^ c3 ^ k1;                                                          \
                c1 = b;                                                                            \
                c3 = a;                                                                            \
                k0 += 0x9E3779B9u;                                                                 \
                k1 += 0xBB67AE85u;                                                                 \
            }                                                                                      \
            a = (c0 & 0xFFFFFFFFu) | c1 << 32;                                                     \
            b = (c2 & 0xFFFFFFFFu) | c3 << 32;                                                     \
            c0 = (tshi_dropout_##isa)op(unpacklo_epi64, (reg)a, (reg)b);                           \
            c1 = (tshi_dropout_##isa)op(unpackhi_epi64, (reg)a, (reg)b);                           \
            memcpy(word + i, &c0, bytes);                                                          \
            memcpy(word + i + (bytes) / 4, &c1, bytes);                                            \
        }                                                                                          \
    }
/* These call an intrinsic by name. AVX-512 takes its form with a mask, here of all lanes, because
 * gcc 12 warns of its own header at the form without. */
#define TSHI_MAP_256(name, a, b) _mm256_##name(a, b)
#define TSHI_MAP_512(name, a, b) _mm512_maskz_##name(0xFF, a, b)
TSHI_DROPOUT_WORDS(avx2, TSHI_AVX2, 32, __m256i, TSHI_MAP_256, 0, 2, 1, 3)
TSHI_DROPOUT_WORDS(avx512, TSHI_AVX512, 64, __m512i, TSHI_MAP_512, 0, 4, 1, 5, 2, 6, 3, 7)
#undef TSHI_MAP_256
#undef TSHI_MAP_512
#undef TSHI_DROPOUT_WORDS
#else
#define tshi_dropout_words_avx2   tshi_rng_words /* not x86: draws words without vectors */
#define tshi_dropout_words_avx512 tshi_rng_words
#endif
#define tshi_dropout_words_portable tshi_rng_words

/* Defines the dropout kernel: y = x times 0 or 1 / (1 - p). Operands: y and x (may be y), dense.
 * draw: number of random words that are drawn at a time. */
#define TSHI_DROPOUT_MASK(isa, TARGET, draw)                                                       \
    TARGET static void tshi_dropout_mask_##isa(int64_t n, const tshi_operand *operand,             \
                                               const void *params) {                               \
        const tshi_dropout_run *part = (const tshi_dropout_run *)params;                           \
        tsh_real *y = (tsh_real *)operand[0].data;                                                 \
        const tsh_real *x = (const tsh_real *)operand[1].data;                                     \
        const double limit = part->mask->p * 4294967296.0; /* p 2^32: lower words give 0 */        \
        const uint32_t below = limit >= 4294967295.0 ? 0xFFFFFFFFu : (uint32_t)limit;              \
        const tsh_real scale = part->mask->p < 1 ? TSHI_R(1 / (1 - part->mask->p)) : 0;            \
        const uint64_t key = part->mask->key, stream = part->mask->stream;                         \
        uint32_t word[TSHI_RNG_WORDS];                                                             \
        int64_t i, j, m;                                                                           \
        int skip = (int)(part->first % 4); /* words to skip: Philox makes 4 at a time */           \
        for (i = 0; i < n; i += m, skip = 0) {                                                     \
            m = tshi_base_min((draw)-skip, n - i);                                                 \
            tshi_dropout_words_##isa(key, stream, (uint64_t)(part->first + i) / 4, word);          \
            TSHI_LANES for (j = 0; j < m; j++)                                                     \
                y[i + j] = word[skip + j] >= below ? x[i + j] * scale : 0;                         \
        }                                                                                          \
    }
TSHI_DROPOUT_MASK(portable, , TSHI_RNG_WORDS)
TSHI_DROPOUT_MASK(avx2, TSHI_AVX2, TSHI_DROPOUT_DRAW)
TSHI_DROPOUT_MASK(avx512, TSHI_AVX512, TSHI_DROPOUT_DRAW)
#undef TSHI_DROPOUT_MASK
#undef tshi_dropout_words_portable
#if !TSHI_X86
#undef tshi_dropout_words_avx2
#undef tshi_dropout_words_avx512
#endif
TSHI_KERNEL_TABLE(tshi_dropout_mask);

/* Applies dropout to `length` adjacent elements, which begin at index `global` of the whole tensor
 * and at index `local` of this rank's values. */
static void tshi_dropout_mask_run(tshi_dropout_run *run, int64_t global, int64_t local,
                                  int64_t length) {
    const tshi_operand x[2] = {tshi_kernel_reals(run->y + local, 1),
                               tshi_kernel_reals(run->x + local, 1)};
    run->first = global;
    tshi_dropout_mask[run->isa](length, x, run);
}

/* Applies dropout to this rank's shard of t, run by run of adjacent elements. */
static void tshi_dropout_mask_all(tshi_dropout_run *run, const tsh_tensor *t) {
    tshi_runs part = tshi_tensor_own_runs(t);
    while (tshi_tensor_next_run(&part))
        tshi_dropout_mask_run(run, part.global, part.local, part.length);
}

/* Backward: dx = dropout of dy, with the same mask. */
static void tshi_dropout_backward(tshi_node *node) {
    tsh_tensor *out = node->out;
    tshi_dropout_run run = {(const tshi_dropout *)node->params, tshi_tape_grad(node), NULL,
                            out->ctx->isa, 0};
    tshi_dest dest;
    tshi_block *scratch;
    if (!tshi_tape_dest(node, 0, &dest)) return;
    run.y = tshi_op_dense_dest(node->in[0], &dest, &scratch); /* dest.data, or dense scratch */
    if (!run.y) return;
    tshi_dropout_mask_all(&run, out);
    tshi_op_accumulate(node->in[0], &dest, scratch);
}

static const tshi_op tshi_dropout_op = {
    "tsh_dropout", "x", tshi_rule_keep, tshi_dropout_backward, TSHI_NONE, 0};

TSH_API tsh_tensor *tsh_dropout(tsh_tensor *x, double p, tsh_module *owner) {
    tsh_ctx *ctx = tshi_tensor_check_floating("tsh_dropout", "x", &x, 1);
    tsh_shape shape = tsh_shape_of(x);
    tshi_dropout mask;
    tshi_dropout_run run = {&mask, NULL, NULL, 0, 0};
    tshi_block *scratch, *unrounded;
    tsh_tensor *out;
    if (!ctx) return NULL;
    if (!(p >= 0 && p <= 1))
        return tshi_error_null(ctx, TSH_ERR_ARGUMENT, "tsh_dropout: p is %g, not within [0, 1]", p);
    if (p <= 0) return x; /* p is 0: x is the result, and no mask is drawn */
    out = tshi_tensor_out(ctx, "tsh_dropout", x->dtype, &shape, &x->layout);
    if (!out) return NULL;
    mask = tshi_dropout_next_mask(ctx, p, owner);
    run.isa = ctx->isa;
    /* where results go as tsh_real: to out's own memory, or to *unrounded until they are rounded */
    run.y = tshi_kernel_output(out, &unrounded);
    /* x's values as dense tsh_real: x's own, or a copy in *scratch */
    run.x = tshi_kernel_packed_reals(x, &scratch);
    if (run.x && run.y) tshi_dropout_mask_all(&run, out);
    tshi_mem_release(ctx, scratch);
    tshi_kernel_output_done(out, unrounded); /* rounds to out's dtype */
    tshi_op_record(&tshi_dropout_op, out, &x, 1, TSHI_NONE, &mask, sizeof mask, NULL);
    return ctx->error.code == TSH_OK ? out : NULL;
}
