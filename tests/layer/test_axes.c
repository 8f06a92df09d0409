/* What a rank sends in one step of training, by the axis: exactly the formulas of
 * examples/README.md, "Which kind of parallelism when". */
#include "../../tshard.h"
#include "../../backends/tshard_threads.h"
#include "../support/ranks.h"
#include "../support/small_gpt.h"

enum { MICRO_MAX = 4, STEPS = 2 };

typedef struct setup {
    int layers, tp, pp, dp, m; /* m: micro-batches of GPT_BATCH each */
    int sequence, zero;        /* sequence REGATHER: with .regather */
} setup;

enum { REGATHER = 2 };

/* ------------------------------------------------------------------ the formulas
 * Bytes. P is the degree of the axis, A = B T C elements an activation of one micro-batch. A ring
 * sends (P - 1) / P of what it gathers or reduce-scatters, twice that of what it all-reduces. */

typedef struct traffic {
    uint64_t tp, pp, dp;
} traffic;

/* Where a rank stands: layers of its stage; rows of the vocabulary that it holds. */
typedef struct place {
    uint64_t layers, rows;
    int first, last;
} place;

static const uint64_t real = sizeof(tsh_real), b = GPT_BATCH, t = GPT_CONTEXT, c = GPT_WIDTH;

static uint64_t gather(uint64_t bytes, int p) {
    return bytes * (uint64_t)(p - 1) / (uint64_t)p;
}

static uint64_t all_reduce(uint64_t bytes, int p) {
    return gather(2 * bytes, p);
}

/* Every layer all-reduces two activations forward and two gradients backward, the embedding one,
 * the head one. Reduce-scatter and all-gather together are an all-reduce. Apart from activations:
 * for the loss, one number per token is all-reduced, and two are all-gathered; eight bytes for the
 * norm. */
static uint64_t over_tp(const setup *s, const place *at) {
    const uint64_t l = at->layers, m = (uint64_t)s->m;
    const uint64_t first = (uint64_t)at->first, last = (uint64_t)at->last;
    uint64_t sent = m * (4 * l + first + last) * all_reduce(b * t * c * real, s->tp);
    sent += m * last * all_reduce(b * t * real, s->tp);
    sent += m * last * gather(2 * b * t * real * (uint64_t)s->tp, s->tp);
    sent += all_reduce(8, s->tp);
    if (!s->sequence) return sent;
    /* the slope of the positions; of norms and of row-parallel biases, each of a piece of T */
    sent += m * first * gather(t * c * real, s->tp);
    sent += all_reduce(((2 * l + last) * 2 * c + 2 * l * c) * real, s->tp);
    if (s->sequence == REGATHER) sent += m * 2 * l * gather(b * t * c * real, s->tp);
    return sent;
}

/* At each boundary of two stages, 168 bytes and an activation are sent forward, and its gradient
 * backward. Between the first and the last stage, the gradient of the table that is embedding and
 * head; over all of them, the loss and the norm. */
static uint64_t over_pp(const setup *s, const place *at) {
    const uint64_t crosses = b * t * c * real / (s->sequence ? (uint64_t)s->tp : 1);
    uint64_t sent = 0;
    if (s->pp == 1) return 0;
    if (!at->last) sent += (uint64_t)s->m * (crosses + 168);
    if (!at->first) sent += (uint64_t)s->m * crosses;
    if (at->first || at->last) sent += at->rows * c * real;
    return sent + 8 + all_reduce(8, s->pp);
}

/* Gradients once, in whatever buckets; with ZeRO as reduce-scatter and, of parameters, all-gather:
 * the same; and the norm, a number per replica. */
static uint64_t over_dp(const setup *s, const place *at) {
    const uint64_t block = (12 * c * c + 7 * c) / (uint64_t)s->tp + 6 * c;
    uint64_t n = at->layers * block;
    if (at->first) n += t * c;
    if (at->last) n += 2 * c;
    if (at->first || at->last) n += at->rows * c;
    return all_reduce(n * real, s->dp) + (s->zero ? all_reduce(8 * (uint64_t)s->dp, s->dp) : 0);
}

static traffic expected(tsh_ctx *ctx, const setup *s) {
    const int each = (GPT_VOCABULARY + s->tp - 1) / s->tp, from = tsh_tp(ctx)->rank * each;
    const int stage = tsh_pp(ctx)->rank;
    const place at = {
        .layers = (uint64_t)(s->layers / s->pp),
        .rows = (uint64_t)(from + each < GPT_VOCABULARY ? each : GPT_VOCABULARY - from),
        .first = stage == 0,
        .last = stage == s->pp - 1};
    const traffic bytes = {over_tp(s, &at), over_pp(s, &at), over_dp(s, &at)};
    return bytes;
}

/* -------------------------------------------------------------------- the model */

typedef struct trainer {
    tsh_module *gpt;
    tsh_optim *optim;
    tsh_pipeline *pipe; /* NULL: one stage */
    tsh_tensor *ids[MICRO_MAX], *targets[MICRO_MAX];
} trainer;

static void shard(tsh_module *gpt, int sequence) {
    tsh_plan_rule plan[GPT_SEQUENCE_RULES];
    int i;
    memcpy(plan, gpt_sequence_plan, sizeof plan);
    for (i = 0; i < GPT_SEQUENCE_RULES; i++)
        plan[i].regather = plan[i].regather && sequence == REGATHER;
    (void)tsh_parallelize(gpt, sequence ? plan : gpt_plan,
                          sequence ? GPT_SEQUENCE_RULES : GPT_RULES);
}

static tsh_tensor *first_input(tsh_ctx *ctx, int k, void *user) {
    const trainer *r = (const trainer *)user;
    tsh_tensor *at = tsh_arange(ctx, TSH_I32, 0, GPT_CONTEXT, 1);
    return gpt_call(r->gpt, "drop",
                    tsh_add(gpt_call(r->gpt, "wte", r->ids[k]), gpt_call(r->gpt, "wpe", at)));
}

static tsh_tensor *last_loss(tsh_ctx *ctx, tsh_tensor *y, int k, void *user) {
    const trainer *r = (const trainer *)user;
    (void)ctx;
    y = gpt_call(r->gpt, "lm_head", gpt_call(r->gpt, "ln_f", y));
    return tsh_cross_entropy(y, r->targets[k], NULL);
}

static int make_trainer(tsh_ctx *ctx, trainer *r, const setup *s) {
    const tsh_optim_desc adamw = {.kind = TSH_ADAMW, .clip_norm = 1, .zero = s->zero};
    const tsh_pipeline_desc desc = {
        .micro_batches = s->m, .input = first_input, .loss = last_loss, .user = r};
    const tsh_shape shape = tsh_shape2(GPT_BATCH, GPT_CONTEXT);
    const gpt_form form = {.layers = s->layers};
    int k;
    r->gpt = gpt_add_form(ctx, &form);
    shard(r->gpt, s->sequence);
    for (k = 0; k < s->m; k++) {
        r->ids[k] = tsh_tensor_new(ctx, TSH_I32, shape, tsh_replicated());
        r->targets[k] = tsh_tensor_new(ctx, TSH_I32, shape, tsh_replicated());
        gpt_load(ctx, r->ids[k], r->targets[k], k);
    }
    if (s->pp > 1) r->pipe = tsh_pipeline_new(tsh_find(r->gpt, "h"), &desc);
    CHECK(s->pp == 1 || r->pipe, "pipeline");
    r->optim = tsh_optim_new(r->gpt, &adamw);
    CHECK_OK();
    return 0;
}

/* ------------------------------------------------------------------ the counters */

static uint64_t sent_over(const tsh_comm *comm) {
    uint64_t bytes = 0;
    int kind;
    for (kind = 0; kind < TSH_COLL_KINDS; kind++) bytes += comm->stats.bytes[kind];
    return bytes;
}

static int one_step(tsh_ctx *ctx, trainer *r, int step) {
    double loss = (double)NAN;
    if (!r->pipe) {
        loss = gpt_step(ctx, r->optim, r->ids[0], r->targets[0], step);
    } else {
        CHECK(tsh_pipeline_train(r->pipe, &loss) == TSH_OK, "train");
        CHECK(tsh_optim_step(r->optim) == TSH_OK, "optimiser");
        tsh_zero_grads(r->gpt);
        (void)tsh_step_end(ctx);
    }
    CHECK_OK();
    CHECK(loss > 0, "loss %g", loss);
    CHECK(tsh_optim_state(r->optim).steps == step + 1, "it trains");
    return 0;
}

static int equal(tsh_ctx *ctx, const setup *s, const char *axis, uint64_t got, uint64_t want) {
    CHECK(got == want, "over %s, with tp %d, pp %d, dp %d, %d layers: %lu bytes, not %lu", axis,
          s->tp, s->pp, s->dp, s->layers, (unsigned long)got, (unsigned long)want);
    return 0;
}

static int count(tsh_ctx *ctx, void *user) {
    const setup *s = (const setup *)user;
    const traffic want = expected(ctx, s);
    trainer r;
    int step;
    memset(&r, 0, sizeof r);
    if (make_trainer(ctx, &r, s)) return 1;
    for (step = 0; step < STEPS; step++) {
        const uint64_t world = sent_over(tsh_world(ctx)), tp = sent_over(tsh_tp(ctx)),
                       pp = sent_over(tsh_pp(ctx)), dp = sent_over(tsh_dp(ctx));
        if (one_step(ctx, &r, step)) return 1;
        if (equal(ctx, s, "tp", sent_over(tsh_tp(ctx)) - tp, want.tp) ||
            equal(ctx, s, "pp", sent_over(tsh_pp(ctx)) - pp, want.pp) ||
            equal(ctx, s, "dp", sent_over(tsh_dp(ctx)) - dp, want.dp) ||
            equal(ctx, s, "the world", sent_over(tsh_world(ctx)) - world, 0))
            return 1;
    }
    return 0;
}

static void prove(const setup *setups, int n) {
    int i;
    for (i = 0; i < n; i++) {
        setup s = setups[i];
        const tsh_desc desc = {.tp = s.tp, .pp = s.pp};
        ranks_run_with(s.tp * s.pp * s.dp, &desc, count, &s);
    }
}

static void one_rank_sends_nothing(void **state) {
    static const setup setups[] = {{2, 1, 1, 1, 1, 0, 0}, {2, 1, 1, 1, 1, REGATHER, 1}};
    const place only = {2, GPT_VOCABULARY, 1, 1};
    (void)state;
    assert_int_equal(over_tp(&setups[1], &only) + over_dp(&setups[1], &only), 0);
    prove(setups, COUNT(setups));
}

static void tensor_parallel(void **state) {
    static const setup setups[] = {
        {2, 2, 1, 1, 1, 0, 0}, {3, 2, 1, 1, 1, 0, 0}, {2, 4, 1, 1, 1, 0, 0}};
    (void)state;
    prove(setups, COUNT(setups));
}

static void sequence_parallel(void **state) {
    static const setup setups[] = {{2, 2, 1, 1, 1, 1, 0},
                                   {3, 2, 1, 1, 1, 1, 0},
                                   {2, 2, 1, 1, 1, REGATHER, 0},
                                   {3, 4, 1, 1, 1, REGATHER, 0}};
    (void)state;
    prove(setups, COUNT(setups));
}

static void pipeline(void **state) {
    static const setup setups[] = {
        {2, 1, 2, 1, 4, 0, 0}, {4, 1, 2, 1, 3, 0, 0}, {3, 1, 3, 1, 4, 0, 0}, {4, 1, 4, 1, 4, 0, 0}};
    (void)state;
    prove(setups, COUNT(setups));
}

static void data_parallel(void **state) {
    static const setup setups[] = {
        {2, 1, 1, 2, 1, 0, 0}, {3, 1, 1, 2, 1, 0, 0}, {2, 1, 1, 4, 1, 0, 0}};
    (void)state;
    prove(setups, COUNT(setups));
}

static void zero_stage_1(void **state) {
    static const setup setups[] = {
        {2, 1, 1, 2, 1, 0, 1}, {3, 1, 1, 2, 1, 0, 1}, {2, 1, 1, 4, 1, 0, 1}};
    (void)state;
    prove(setups, COUNT(setups));
}

static void all_axes(void **state) {
    static const setup setups[] = {{2, 2, 2, 2, 4, 0, 0},
                                   {4, 2, 2, 2, 3, 0, 1},
                                   {4, 2, 2, 2, 4, 1, 0},
                                   {2, 2, 2, 2, 4, REGATHER, 1}};
    (void)state;
    prove(setups, COUNT(setups));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(one_rank_sends_nothing),
        cmocka_unit_test(tensor_parallel),
        cmocka_unit_test(sequence_parallel),
        cmocka_unit_test(pipeline),
        cmocka_unit_test(data_parallel),
        cmocka_unit_test(zero_stage_1),
        cmocka_unit_test(all_axes),
    };
    return cmocka_run_group_tests_name("layer/axes", tests, NULL, NULL);
}
