/* What does not depend on the degree of tensor parallelism: initial weights and dropout masks to
 * the bit, losses within rounding; and plans, which shard a model without changing it. */
#include "../../tshard.h"
#include "../../backends/tshard_threads.h"
#include "../support/ranks.h"
#include "../support/small_gpt.h"

/* --------------------------------------------------------------------- hashes */

enum { HASHES = 96 };

/* Hashes in some order, as rank 0 found them; every rank must find the same. */
typedef struct hashes {
    uint64_t hash[HASHES];
    int count, late; /* late: sharded when there are values already */
    uint64_t seed;
} hashes;

static void hash_param(const char *path, tsh_tensor *param, void *user) {
    hashes *h = (hashes *)user;
    (void)path;
    h->hash[h->count++] = tsh_hash(tsh_ctx_of(param), param);
}

/* Rank 0 keeps what it found; the others compare through the group. */
static int agree(tsh_ctx *ctx, const hashes *mine, hashes *out) {
    int64_t theirs[HASHES];
    int i;
    for (i = 0; i < mine->count; i++) theirs[i] = (int64_t)mine->hash[i];
    CHECK(tsh_broadcast(tsh_tp(ctx), theirs, mine->count, TSH_I64, 0) == TSH_OK, "broadcast");
    for (i = 0; i < mine->count; i++)
        CHECK(theirs[i] == (int64_t)mine->hash[i], "rank 0 has another hash %d", i);
    if (tsh_world(ctx)->rank == 0) {
        memcpy(out->hash, mine->hash, sizeof out->hash);
        out->count = mine->count;
    }
    return 0;
}

static void expect_same(const hashes *a, const hashes *b, int ranks) {
    int i;
    assert_int_equal(a->count, b->count);
    for (i = 0; i < a->count; i++)
        if (a->hash[i] != b->hash[i])
            fail_msg("%d ranks: hash %d is %016lx, not %016lx", ranks, i, (unsigned long)b->hash[i],
                     (unsigned long)a->hash[i]);
}

/* ------------------------------------------------------------------ initial weights */

static int initial(tsh_ctx *ctx, void *user) {
    hashes mine = {.count = 0}, *out = (hashes *)user;
    tsh_module *gpt = gpt_add(ctx);
    if (out->late) CHECK(tsh_materialize(gpt) == TSH_OK, "values first");
    CHECK(tsh_parallelize(gpt, gpt_plan, GPT_RULES) == TSH_OK, "plan");
    CHECK(tsh_materialize(gpt) == TSH_OK, "values");
    tsh_each_param(gpt, hash_param, &mine);
    CHECK(mine.count == 3 + 12 * GPT_LAYERS + 1, "%d parameters, tied ones once", mine.count);
    CHECK(tsh_check_replicas(gpt), "replicas are equal");
    return agree(ctx, &mine, out);
}

static void initial_weights_are_the_same_bits(void **state) {
    enum { NORMS = 2 * GPT_LAYERS + 1 }; /* their weights are all ones, their biases all zeros */
    hashes one = {.count = 0}, many;
    int i, j, late, distinct = 0;
    (void)state;
    ranks_run(1, initial, &one);
    for (i = 0; i < one.count; i++) {
        for (j = 0; j < i && one.hash[i] != one.hash[j]; j++) continue;
        distinct += j == i;
    }
    assert_int_equal(distinct, one.count - 2 * NORMS + 2);
    for (late = 0; late < 2; late++)
        for (i = 0; i < COUNT(ranks_degrees); i++) {
            memset(&many, 0, sizeof many);
            many.late = late;
            ranks_run(ranks_degrees[i], initial, &many);
            expect_same(&one, &many, ranks_degrees[i]);
        }
}

/* The shard itself is the slice of what one rank has: bits, not a hash. Every kind of start. */
static int slices(tsh_ctx *ctx, void *user) {
    static const tsh_init kinds[] = {{.kind = TSH_INIT_DEFAULT, .a = 0, .b = 0},
                                     {.kind = TSH_INIT_ZEROS, .a = 0, .b = 0},
                                     {.kind = TSH_INIT_ONES, .a = 0, .b = 0},
                                     {.kind = TSH_INIT_CONSTANT, .a = 3, .b = 0},
                                     {.kind = TSH_INIT_UNIFORM, .a = -2, .b = 5},
                                     {.kind = TSH_INIT_NORMAL, .a = 1, .b = 4},
                                     {.kind = TSH_INIT_KAIMING_UNIFORM, .a = 1, .b = 0}};
    double **whole = (double **)user;
    int i, e;
    for (i = 0; i < COUNT(kinds); i++) {
        const tsh_linear_desc desc = {.in = 5,
                                      .out = 18,
                                      .style = tsh_tp(ctx)->size > 1 ? TSH_COLWISE : TSH_PLAIN,
                                      .segments = 3,
                                      .unit = 2,
                                      .weight_init = kinds[i]};
        char name[16];
        tsh_module *layer;
        double *values;
        (void)snprintf(name, sizeof name, "l%d", i);
        layer = tsh_add_linear(tsh_root(ctx), name, &desc);
        CHECK(layer && tsh_materialize(layer) == TSH_OK, "init %d", i);
        CHECK((values = ranks_values(ctx, tsh_param(layer, "weight"))), "init %d", i);
        if (tsh_tp(ctx)->size == 1) {
            whole[i] = values;
            continue;
        }
        for (e = 0; e < 5 * 18; e++)
            CHECK(values[e] == whole[i][e], "init %d, element %d: %g", i, e, values[e]);
        free(values);
    }
    return 0;
}

static void a_shard_is_the_slice_of_the_whole(void **state) {
    double *whole[7];
    int i;
    (void)state;
    for (i = 0; i < COUNT(ranks_degrees); i++) ranks_run(ranks_degrees[i], slices, whole);
    for (i = 0; i < 7; i++) free(whole[i]);
}

/* Another seed, another start. */
static void another_seed_gives_other_weights(void **state) {
    tsh_desc desc = {.seed = 1};
    hashes zero = {.count = 0}, one = {.count = 0};
    (void)state;
    ranks_run(1, initial, &zero);
    ranks_run_with(2, &desc, initial, &one);
    assert_true(zero.hash[0] != one.hash[0]);
}

/* --------------------------------------------------------------------- dropout */

/* Masks of ones under several layouts, by function, by module and through attention. */
static int masks(tsh_ctx *ctx, void *user) {
    static const char *const layouts[] = {"R",    "S(0)",         "S(1)",
                                          "S(2)", "S(1, unit 3)", "S(1, 3 segments, unit 2)"};
    hashes mine = {.count = 0};
    tsh_module *module = tsh_add_dropout(tsh_root(ctx), "drop", 0.5);
    int i, call;
    for (i = 0; i < COUNT(layouts); i++)
        for (call = 0; call < 3; call++) {
            tsh_tensor *ones = tsh_ones(ctx, tsh_shape3(3, 18, 5)), *y;
            ones = tsh_redistribute(ones, spec_layout(layouts[i], 1));
            y = call < 2 ? tsh_dropout(ones, 0.3, call ? module : NULL) : tsh_forward(module, ones);
            CHECK(y, "%s", layouts[i]);
            mine.hash[mine.count++] = tsh_hash(ctx, y);
        }
    return agree(ctx, &mine, (hashes *)user);
}

static void dropout_masks_are_the_same_bits(void **state) {
    hashes one = {.count = 0}, many = {.count = 0};
    int i, j;
    (void)state;
    ranks_run(1, masks, &one);
    for (i = 0; i < one.count; i++)
        for (j = 0; j < i; j++) assert_true(one.hash[i] != one.hash[j]); /* each call its own */
    for (i = 0; i < COUNT(ranks_degrees); i++) {
        ranks_run(ranks_degrees[i], masks, &many);
        expect_same(&one, &many, ranks_degrees[i]);
    }
}

/* Dropout inside attention drops the same scores of the same heads. */
static tsh_tensor *attention_with_dropout(probe *p) {
    const tsh_attention_desc desc = {.causal = 1, .dropout = 0.5};
    return tsh_attention(p->in[0], p->in[1], p->in[2], &desc);
}

static void attention_drops_the_same_scores(void **state) {
    static const trial rows[] = {
        TRIAL(attention_with_dropout, "", "S(1)", 2e-5, 0, "2,n,5,2 S(1)", "2,n,5,2 S(1)",
              "2,n,5,2 S(1)"),
        TRIAL(attention_with_dropout, "", "S(0)", 2e-5, 0, "n,2,5,2 S(0)", "n,2,5,2 S(0)",
              "n,2,5,2 S(0)"),
    };
    static const int64_t lengths[] = {1, 3, 4};
    (void)state;
    trials_prove(rows, COUNT(rows), lengths, COUNT(lengths));
}

/* Replicas of data parallelism drop other elements and start from the same weights. */
static int replicas(tsh_ctx *ctx, void *user) {
    const tsh_linear_desc desc = {.in = 4, .out = 6, .style = TSH_COLWISE};
    tsh_module *layer = tsh_add_linear(tsh_root(ctx), "l", &desc);
    uint64_t mask = tsh_hash(ctx, tsh_dropout(tsh_ones(ctx, tsh_shape1(64)), 0.5, NULL));
    uint64_t start = tsh_hash(ctx, tsh_param(layer, "weight"));
    int64_t pair[2] = {(int64_t)mask, (int64_t)start}, least[2], most[2];
    (void)user;
    memcpy(least, pair, sizeof pair);
    memcpy(most, pair, sizeof pair);
    CHECK(tsh_allreduce(tsh_tp(ctx), least, 2, TSH_I64, TSH_MIN) == TSH_OK, "over tp");
    CHECK(least[0] <= pair[0] && least[1] <= pair[1], "a minimum");
    CHECK(tsh_allreduce(tsh_tp(ctx), most, 2, TSH_I64, TSH_MAX) == TSH_OK, "over tp");
    CHECK(least[0] == most[0] && least[1] == most[1], "one mask and one weight over tp");
    CHECK(tsh_allreduce(tsh_dp(ctx), least, 2, TSH_I64, TSH_MIN) == TSH_OK, "over dp");
    CHECK(tsh_allreduce(tsh_dp(ctx), most, 2, TSH_I64, TSH_MAX) == TSH_OK, "over dp");
    CHECK(least[0] != most[0], "two masks over dp");
    CHECK(least[1] == most[1], "one weight over dp");
    return 0;
}

static void replicas_drop_other_elements(void **state) {
    tsh_desc desc = {.tp = 2};
    (void)state;
    ranks_run_with(4, &desc, replicas, NULL);
}

/* --------------------------------------------------------------- check_replicas */

static int drifted(tsh_ctx *ctx, void *user) {
    const tsh_linear_desc plain = {.in = 3, .out = 2};
    tsh_module *a = tsh_add_linear(tsh_root(ctx), "a", &plain);
    const tsh_real moved[2] = {1, 2};
    (void)user;
    tsh_materialize(a);
    CHECK(tsh_check_replicas(tsh_root(ctx)), "equal at first");
    if (tsh_tp(ctx)->rank == tsh_tp(ctx)->size - 1)
        tsh_write(ctx, tsh_param(a, "bias"), TSH_LOCAL, moved, sizeof moved);
    CHECK(tsh_check_replicas(tsh_root(ctx)) == (tsh_tp(ctx)->size == 1), "one rank drifted");
    if (tsh_tp(ctx)->size == 1) return 0;
    CHECK(tsh_last_error(ctx)->code == TSH_ERR_STATE, "its code");
    CHECK(strstr(tsh_last_error(ctx)->message, "\"a.bias\""), "names the parameter");
    return 0;
}

static void drifted_replicas_are_found(void **state) {
    int i;
    (void)state;
    for (i = 0; i < COUNT(ranks_degrees); i++) ranks_run(ranks_degrees[i], drifted, NULL);
}

/* -------------------------------------------------------------------- training */

enum { STEPS = 20 };

typedef struct course {
    double loss[STEPS];
    hashes end;
    int late;
} course;

static int train(tsh_ctx *ctx, void *user) {
    course *out = (course *)user;
    hashes mine = {.count = 0};
    tsh_module *gpt = gpt_add(ctx);
    const tsh_optim_desc adamw = {
        .kind = TSH_ADAMW, .lr = 3e-3, .weight_decay = 0.1, .clip_norm = 1};
    const tsh_shape shape = tsh_shape2(GPT_BATCH, GPT_CONTEXT);
    tsh_tensor *ids = tsh_tensor_new(ctx, TSH_I32, shape, tsh_replicated());
    tsh_tensor *targets = tsh_tensor_new(ctx, TSH_I32, shape, tsh_replicated());
    tsh_optim *optim;
    int step;
    if (out->late) tsh_materialize(gpt);
    CHECK(tsh_parallelize(gpt, gpt_plan, GPT_RULES) == TSH_OK, "plan");
    optim = tsh_optim_new(gpt, &adamw);
    for (step = 0; step < STEPS; step++) {
        double loss = gpt_step(ctx, optim, ids, targets, step);
        CHECK_OK();
        if (tsh_world(ctx)->rank == 0) out->loss[step] = loss;
    }
    CHECK(tsh_optim_state(optim).steps == STEPS, "no step was left out");
    CHECK(tsh_check_replicas(gpt), "replicas stay equal");
    tsh_each_param(gpt, hash_param, &mine);
    return agree(ctx, &mine, &out->end);
}

/* The tolerance is for sums in another order, whose rounding 20 steps of Adam enlarge. */
static void losses_agree_at_every_degree(void **state) {
    static const int degrees[] = {2, 3, 4};
    course one = {.late = 0}, many;
    int i, step;
    (void)state;
    ranks_run(1, train, &one);
    assert_true(one.loss[STEPS - 1] < one.loss[0] - 0.1); /* it learns */
    for (i = 0; i < COUNT(degrees); i++) {
        memset(&many, 0, sizeof many);
        ranks_run(degrees[i], train, &many);
        for (step = 0; step < STEPS; step++)
            if (!(fabs(many.loss[step] - one.loss[step]) <= 1e-3))
                fail_msg("tp %d, step %d: loss %.6f, not %.6f", degrees[i], step, many.loss[step],
                         one.loss[step]);
    }
}

static void two_runs_give_the_same_bits(void **state) {
    course a, b;
    int ranks, i;
    (void)state;
    for (ranks = 1; ranks <= 3; ranks++)
        for (i = 0; i < 2; i++) {
            memset(&a, 0, sizeof a);
            memset(&b, 0, sizeof b);
            b.late = i; /* sharding a model that holds values changes nothing */
            ranks_run(ranks, train, &a);
            ranks_run(ranks, train, &b);
            assert_memory_equal(a.loss, b.loss, sizeof a.loss);
            expect_same(&a.end, &b.end, ranks);
        }
}

#ifdef TESTS_MPI
static void mpi_gives_the_bits_of_threads(void **state) {
    course a, b;
    (void)state;
    memset(&a, 0, sizeof a);
    memset(&b, 0, sizeof b);
    ranks_run(mpi_size(), train, &a);
    ranks_run_at(RANKS_FIRST, mpi_size(), NULL, train, &b);
    assert_true(b.loss[0] > 0);
    assert_memory_equal(a.loss, b.loss, sizeof a.loss);
    expect_same(&a.end, &b.end, mpi_size());
}
#endif

/* ------------------------------------------------------------------------ plans */

typedef struct bad_plan {
    tsh_plan_rule rules[2];
    int count;
    tsh_result code;
    const char *sentence[3];
} bad_plan;

static const bad_plan bad_plans[] = {
    /* nothing matches: the nearest names are listed */
    {{{.path = "h.0.atn.c_attn", .style = TSH_COLWISE}},
     1,
     TSH_ERR_ARGUMENT,
     {"\"h.0.atn.c_attn\" matches no", "near it are", "\"h.0.attn.c_attn\""}},
    {{{.path = "wet", .style = TSH_ROWWISE}}, 1, TSH_ERR_ARGUMENT, {"\"wet\"", "near", "\"wte\""}},
    {{{.path = "h.*", .style = TSH_COLWISE}}, 1, TSH_ERR_ARGUMENT, {"\"h.*\" matches no module"}},
    {{{.path = "ln_f", .style = TSH_ROWWISE}}, 1, TSH_ERR_ARGUMENT, {"\"ln_f\" matches no module"}},
    /* two rules for one layer */
    {{{.path = "h.*.mlp.c_fc", .style = TSH_COLWISE}, {.path = "h.1.**", .style = TSH_ROWWISE}},
     2,
     TSH_ERR_ARGUMENT,
     {"\"h.*.mlp.c_fc\" and \"h.1.**\"", "both match", "\"h.1.mlp.c_fc\""}},
    /* one weight, two layouts */
    {{{.path = "wte", .style = TSH_COLWISE}, {.path = "lm_head", .style = TSH_COLWISE}},
     2,
     TSH_ERR_LAYOUT,
     {"tied parameter \"wte.weight\"", "S(1) for \"wte\"", "S(0) for \"lm_head\""}},
    /* what does not divide */
    {{{.path = "h.0.mlp.c_fc", .style = TSH_COLWISE, .unit = 5}},
     1,
     TSH_ERR_LAYOUT,
     {"\"h.0.mlp.c_fc.weight\" (64, 16)", "units of 5"}},
    {{{.path = "h.0.mlp.c_proj", .style = TSH_ROWWISE, .segments = 3}},
     1,
     TSH_ERR_LAYOUT,
     {"\"h.0.mlp.c_proj.weight\" (16, 64)", "3 segments"}},
};

static void expect_replicated(const char *path, tsh_tensor *param, void *user) {
    (void)path;
    if (tsh_layout_of(param).kind != TSH_REPLICATED) ++*(int *)user;
}

static int refuse_plan(tsh_ctx *ctx, void *user) {
    const bad_plan *bad = (const bad_plan *)user;
    tsh_module *gpt = gpt_add(ctx);
    const tsh_error *error = tsh_last_error(ctx);
    int i, changed = 0;
    CHECK_OK();
    CHECK(tsh_parallelize(gpt, bad->rules, bad->count) == bad->code, "%s", bad->sentence[0]);
    for (i = 0; i < 3 && bad->sentence[i]; i++)
        CHECK(strstr(error->message, bad->sentence[i]), "the sentence lacks %s", bad->sentence[i]);
    tsh_each_param(gpt, expect_replicated, &changed);
    CHECK(!changed, "%d parameters were changed", changed);
    tsh_clear_error(ctx);
    CHECK(tsh_parallelize(gpt, gpt_plan, GPT_RULES) == TSH_OK, "a good plan after a bad one");
    return 0;
}

static void bad_plans_change_nothing(void **state) {
    int i, ranks;
    (void)state;
    for (i = 0; i < COUNT(bad_plans); i++)
        for (ranks = 1; ranks <= 2; ranks++) {
            bad_plan bad = bad_plans[i];
            ranks_run(ranks, refuse_plan, &bad);
        }
}

/* A model that holds values takes any plan, also one after another: its values stay. */
static int shard_again(tsh_ctx *ctx, void *user) {
    static const tsh_plan_rule other[] = {
        {.path = "h.*.mlp.c_fc", .style = TSH_ROWWISE},
        {.path = "h.*.attn.c_attn", .style = TSH_COLWISE},
        {.path = "h.*.attn.c_proj", .style = TSH_PLAIN},
    };
    tsh_module *gpt = gpt_add(ctx);
    tsh_tensor *weight[3];
    uint64_t hash[3];
    int i;
    (void)user;
    CHECK(tsh_materialize(gpt) == TSH_OK, "values");
    weight[0] = tsh_param(gpt, "h.0.mlp.c_fc.weight");
    weight[1] = tsh_param(gpt, "h.1.attn.c_attn.weight");
    weight[2] = tsh_param(gpt, "h.1.attn.c_proj.weight");
    for (i = 0; i < 3; i++) hash[i] = tsh_hash(ctx, weight[i]);
    CHECK(tsh_parallelize(gpt, gpt_plan, GPT_RULES) == TSH_OK, "first");
    CHECK(tsh_parallelize(gpt, gpt_plan, GPT_RULES) == TSH_OK, "the same again");
    CHECK(tsh_parallelize(gpt, other, 3) == TSH_OK, "another");
    for (i = 0; i < 3; i++) CHECK(tsh_hash(ctx, weight[i]) == hash[i], "values of %d", i);
    CHECK(tsh_layout_of(weight[0]).dim == 1, "cut along input features now");
    CHECK(tsh_layout_of(weight[1]).segments == 1, "not fused any more");
    CHECK(tsh_layout_of(weight[2]).kind == TSH_REPLICATED, "whole again");
    CHECK_OK();
    return 0;
}

static void a_sharded_model_can_be_sharded_otherwise(void **state) {
    int i;
    (void)state;
    for (i = 0; i < COUNT(ranks_degrees); i++) ranks_run(ranks_degrees[i], shard_again, NULL);
}

/* Paths: * and ? within a name, ** over any number of names. */
typedef struct pattern {
    const char *path, *matches; /* the layers, by letter, as below */
} pattern;

static const char *const layer_paths[] = {"a", "ab", "b.a", "b.ab", "b.c.a", "b.c.d.a"};

static const pattern patterns[] = {
    {"a", "0"},       {"a*", "01"},       {"?", "0"},          {"??", "1"},      {"**", "012345"},
    {"**.a", "0245"}, {"*.a", "2"},       {"b.*", "23"},       {"b.**", "2345"}, {"b.**.a", "245"},
    {"b.?.?", "4"},   {"b.*.*.*", "5"},   {"**.c.**", "45"},   {"*b", "1"},      {"**.?b", "13"},
    {"b.c.*", "4"},   {"b.**.d.**", "5"}, {"**.**.a", "0245"},
};

static int match(tsh_ctx *ctx, void *user) {
    const pattern *p = (const pattern *)user;
    const tsh_plan_rule rule = {.path = p->path, .style = TSH_COLWISE};
    const tsh_linear_desc desc = {.in = 2, .out = 2};
    tsh_module *root = tsh_root(ctx), *b = tsh_add_module(root, "b", NULL);
    tsh_module *c = tsh_add_module(b, "c", NULL), *d = tsh_add_module(c, "d", NULL);
    char found[COUNT(layer_paths) + 1] = "";
    int i, n = 0;
    tsh_add_linear(root, "a", &desc);
    tsh_add_linear(root, "ab", &desc);
    tsh_add_linear(b, "a", &desc);
    tsh_add_linear(b, "ab", &desc);
    tsh_add_linear(c, "a", &desc);
    tsh_add_linear(d, "a", &desc);
    CHECK(tsh_parallelize(root, &rule, 1) == TSH_OK, "%s", p->path);
    for (i = 0; i < COUNT(layer_paths); i++)
        if (tsh_layout_of(tsh_param(tsh_find(root, layer_paths[i]), "weight")).kind == TSH_SHARDED)
            found[n++] = (char)('0' + i);
    CHECK(strcmp(found, p->matches) == 0, "%s matches %s, not %s", p->path, found, p->matches);
    return 0;
}

static void patterns_match_paths(void **state) {
    int i;
    (void)state;
    for (i = 0; i < COUNT(patterns); i++) {
        pattern p = patterns[i];
        ranks_run(2, match, &p);
    }
}

/* A rule for one owner of a tied weight is a rule for the other. */
static int tied(tsh_ctx *ctx, void *user) {
    const tsh_plan_rule rule = {.path = "lm_head", .style = TSH_COLWISE};
    tsh_module *gpt = gpt_add(ctx);
    tsh_tensor *a = tsh_param(gpt, "wte.weight"), *b = tsh_param(gpt, "lm_head.weight");
    (void)user;
    CHECK(a && a == b, "one object");
    CHECK(tsh_parallelize(gpt, &rule, 1) == TSH_OK, "plan");
    CHECK(tsh_layout_of(a).kind == TSH_SHARDED && tsh_layout_of(a).dim == 0, "both follow");
    CHECK(tsh_local_size(a, 0) == (tsh_tp(ctx)->rank ? 14 : 15), "29 rows on 2 ranks");
    return 0;
}

static void a_tied_weight_has_one_layout(void **state) {
    (void)state;
    ranks_run(2, tied, NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(initial_weights_are_the_same_bits),
        cmocka_unit_test(a_shard_is_the_slice_of_the_whole),
        cmocka_unit_test(another_seed_gives_other_weights),
        cmocka_unit_test(dropout_masks_are_the_same_bits),
        cmocka_unit_test(attention_drops_the_same_scores),
        cmocka_unit_test(replicas_drop_other_elements),
        cmocka_unit_test(drifted_replicas_are_found),
        cmocka_unit_test(losses_agree_at_every_degree),
        cmocka_unit_test(two_runs_give_the_same_bits),
#ifdef TESTS_MPI
        cmocka_unit_test(mpi_gives_the_bits_of_threads),
#endif
        cmocka_unit_test(bad_plans_change_nothing),
        cmocka_unit_test(a_sharded_model_can_be_sharded_otherwise),
        cmocka_unit_test(patterns_match_paths),
        cmocka_unit_test(a_tied_weight_has_one_layout),
    };
    return cmocka_run_group_tests_name("layer/same_bits", tests, NULL, NULL);
}
