/* A program's data: tensors of a step from memory, a warning where a loop leaves tensors behind,
 * samplers (each epoch's order, each replica's part, going on from a state), and tsh_check_inputs,
 * which finds ranks of tp that were given different data. */
#include "../../tshard.h"
#include "../../backends/tshard_threads.h"
#include "../support/logs.h"
#include "../support/ranks.h"

/* ------------------------------------------------------------------ tsh_from */

static int copies(tsh_ctx *ctx, void *user) {
    double six[6] = {1, 2, 3, 4, 5, 6};
    const int32_t ids[2] = {7, -8};
    tsh_real reals[6], got[6];
    char text[100];
    tsh_tensor *t;
    (void)user;
    for (int i = 0; i < 6; i++) reals[i] = (tsh_real)six[i];
    t = tsh_from(ctx, reals, tsh_shape2(2, 3), TSH_DTYPE_DEFAULT);
    reals[0] = 9; /* it is a copy */
    CHECK_TRUE(tsh_read(ctx, t, TSH_GLOBAL, got, sizeof got) == TSH_OK);
    CHECK_TRUE(got[0] == 1 && got[5] == 6 && tsh_dtype_of(t) == TSH_REAL);
    CHECK_TRUE(tsh_layout_of(t).kind == TSH_REPLICATED);
    t = tsh_from(ctx, ids, tsh_shape1(2), TSH_I32);
    CHECK(strcmp(tsh_to_string(t, text, sizeof text), "i32 (2) R: 7 -8") == 0, "%s", text);
    CHECK_TRUE(tsh_from(ctx, NULL, tsh_shape2(0, 3), TSH_F32));
    (void)tsh_step_end(ctx);
    CHECK_TRUE(!tsh_neg(t)); /* it has ended with its step */
    CHECK_SAYS(TSH_ERR_STALE, "tsh_neg");
    CHECK_TRUE(!tsh_from(ctx, NULL, tsh_shape1(1), TSH_F32));
    CHECK_SAYS(TSH_ERR_ARGUMENT, "tsh_from: data is NULL");
    CHECK_TRUE(!tsh_from(ctx, six, tsh_shape1(-1), TSH_F32));
    CHECK_SAYS(TSH_ERR_SHAPE, "tsh_from: dimension 0 is -1");
    CHECK_TRUE(!tsh_from(ctx, six, tsh_shape1(1), (tsh_dtype)77));
    CHECK_SAYS(TSH_ERR_DTYPE, "tsh_from");
    return 0;
}

static void a_step_tensor_from_memory(void **state) {
    (void)state;
    ranks_run(1, copies, NULL);
    ranks_run(2, copies, NULL);
}

/* ------------------------------------------------------------------ the leak */

/* How many warnings so many steps of a loop give. Each makes a tensor: by tsh_tensor_from (how 0),
 * by tsh_keep (1), and frees it (2), but the fiftieth makes none (3), by tsh_from (4). */
static int count_warnings(int how, int steps) {
    static log_lines lines;
    tsh_desc desc;
    const float row[4] = {1, 2, 3, 4};
    tsh_ctx *ctx;
    int found = 0;
    memset(&desc, 0, sizeof desc);
    memset(&lines, 0, sizeof lines);
    desc.logger.log = log_keep;
    desc.logger.user = &lines;
    assert_int_equal(tsh_open(&desc, &ctx), TSH_OK);
    for (int i = 0; i < steps; i++) {
        tsh_tensor *t = NULL;
        if (how == 1) t = tsh_keep(tsh_ones(ctx, tsh_shape1(4)));
        else if (how == 4) t = tsh_from(ctx, row, tsh_shape1(4), TSH_F32);
        else if (how != 3 || i != 50)
            t = tsh_tensor_from(ctx, TSH_F32, tsh_shape1(4), tsh_replicated(), row);
        if (how == 2) tsh_tensor_free(t);
        assert_int_equal(tsh_step_end(ctx), TSH_OK);
    }
    assert_true(tsh_ok(ctx));
    tsh_close(ctx);
    for (int i = 0; i < lines.count; i++)
        if (strstr(lines.line[i], "warning: each of the last 100 steps has left more owned"))
            found++;
    if (found) {
        assert_non_null(strstr(lines.line[0], "100 now, of "));
        assert_non_null(strstr(lines.line[0], "tsh_from makes one that ends with its step"));
    }
    return found;
}

static void owned_tensors_that_grow_are_told(void **state) {
    (void)state;
    assert_int_equal(count_warnings(0, 99), 0);
    assert_int_equal(count_warnings(0, 500), 1); /* once */
    assert_int_equal(count_warnings(1, 100), 1);
    assert_int_equal(count_warnings(2, 500), 0);
    assert_int_equal(count_warnings(3, 149), 0);
    assert_int_equal(count_warnings(4, 500), 0);
}

/* ------------------------------------------------------------------ samplers */

enum { MOST = 64 };

typedef struct taken {
    tsh_sampler sampler;
    int epochs;
    int count[4][MOST];      /* by epoch and sample: how often some replica took it */
    int64_t order[4][MOST];  /* the samples of an epoch in their order */
    int64_t batches[4], part[4];
    int go_on; /* 1: after each batch the sampler is made anew of its state */
} taken;

static int take(tsh_ctx *ctx, void *user) {
    taken *all = (taken *)user;
    tsh_sampler s = all->sampler;
    const int dp = tsh_dp(ctx)->size;
    int64_t n;
    for (int e = 0; e < all->epochs; e++) {
        int64_t begin = 0, batches = 0;
        while ((n = tsh_sampler_next(ctx, &s)) > 0) {
            tsh_range own[TSH_MAX_SEGMENTS];
            tsh_layout rows = tsh_sharded(0);
            CHECK_TRUE(s.mine == tsh_shard_range(rows, n, dp, tsh_dp(ctx)->rank, own));
            CHECK_TRUE(n == all->sampler.batch || begin + n == all->sampler.count);
            for (int64_t i = 0; i < s.mine && tsh_tp(ctx)->rank == 0; i++) {
                const int64_t index = tsh_sampler_index(ctx, &s, i);
                CHECK_TRUE(index >= 0 && index < all->sampler.count);
                (void)__atomic_fetch_add(&all->count[e][index], 1, __ATOMIC_SEQ_CST);
                all->order[e][begin + own[0].start + i] = index;
            }
            begin += n;
            batches++;
            if (all->go_on) {
                tsh_sampler anew = all->sampler;
                anew.epoch = s.epoch;
                anew.at = s.at;
                s = anew;
            }
        }
        CHECK_TRUE(n == 0 && s.mine == 0 && s.epoch == e + 1 && s.at == 0);
        if (tsh_world(ctx)->rank == 0) all->batches[e] = batches;
    }
    return 0;
}

static void sample(taken *all, int64_t count, int64_t batch, int tp, int dp) {
    const tsh_desc desc = {.tp = tp, .seed = 5};
    memset(all->count, 0, sizeof all->count);
    memset(all->order, 0, sizeof all->order);
    all->sampler.count = count;
    all->sampler.batch = batch;
    all->epochs = 4;
    ranks_run_with(tp * dp, &desc, take, all);
}

static void an_epoch_takes_every_sample_once(void **state) {
    static const int64_t counts[] = {1, 2, 3, 7, 16, 17, 64}, batches[] = {1, 3, 8, 64};
    static taken all, again;
    (void)state;
    for (int c = 0; c < COUNT(counts); c++)
        for (int b = 0; b < COUNT(batches); b++)
            for (int dp = 1; dp < 5; dp++) {
                memset(&all, 0, sizeof all);
                sample(&all, counts[c], batches[b], 1, dp);
                for (int e = 0; e < 4; e++) {
                    assert_int_equal(all.batches[e], (counts[c] + batches[b] - 1) / batches[b]);
                    for (int i = 0; i < counts[c]; i++) assert_int_equal(all.count[e][i], 1);
                }
                if (dp == 1) again = all;
                assert_memory_equal(again.order, all.order, sizeof all.order); /* at every degree */
            }
}

static void orders_differ_and_go_on(void **state) {
    static taken all, other;
    (void)state;
    memset(&all, 0, sizeof all);
    sample(&all, 64, 10, 2, 2);
    assert_memory_not_equal(all.order[0], all.order[1], sizeof all.order[0]);
    other = all;
    other.go_on = 1;
    sample(&other, 64, 10, 1, 3);
    assert_memory_equal(all.order, other.order, sizeof all.order);
    other.sampler.seed = 6; /* another seed, another order; 5 is that of the ctx */
    sample(&other, 64, 10, 1, 1);
    assert_memory_not_equal(all.order[0], other.order[0], sizeof all.order[0]);
    other.sampler.seed = 5;
    sample(&other, 64, 10, 1, 1);
    assert_memory_equal(all.order, other.order, sizeof all.order);
    other.sampler.shuffle = TSH_NO;
    sample(&other, 64, 10, 1, 2);
    for (int i = 0; i < 64; i++) assert_int_equal(other.order[2][i], i);
    other.sampler.drop_last = 1;
    sample(&other, 64, 10, 1, 2);
    assert_int_equal(other.batches[0], 6);
    for (int i = 0; i < 64; i++) assert_int_equal(other.count[0][i], i < 60);
}

/* All 24 orders of 4 samples are about equally frequent, and so is each sample at each place of
 * 64. */
static void orders_are_fair(void **state) {
    enum { EPOCHS = 24000 };
    static int seen[256], place[64][64];
    tsh_ctx *ctx;
    tsh_sampler s = {.count = 4, .batch = 4, .seed = 1};
    tsh_sampler wide = {.count = 64, .batch = 64, .seed = 2};
    double chi = 0;
    int orders = 0;
    (void)state;
    assert_int_equal(tsh_open(NULL, &ctx), TSH_OK);
    for (int e = 0; e < EPOCHS; e++) {
        int64_t order = 0;
        assert_int_equal(tsh_sampler_next(ctx, &s), 4);
        for (int i = 0; i < 4; i++) order = 4 * order + tsh_sampler_index(ctx, &s, i);
        seen[order]++;
        assert_int_equal(tsh_sampler_next(ctx, &s), 0);
    }
    for (int i = 0; i < 256; i++) {
        orders += seen[i] > 0;
        if (seen[i]) chi += (seen[i] - 1000.0) * (seen[i] - 1000.0) / 1000;
    }
    assert_int_equal(orders, 24);
    assert_true(chi < 60); /* 23 degrees of freedom: 1 in 30,000 is above */
    for (int e = 0; e < 6400; e++) {
        assert_int_equal(tsh_sampler_next(ctx, &wide), 64);
        for (int i = 0; i < 64; i++) place[i][tsh_sampler_index(ctx, &wide, i)]++;
        assert_int_equal(tsh_sampler_next(ctx, &wide), 0);
    }
    for (int i = 0; i < 64; i++)
        for (int k = 0; k < 64; k++) assert_in_range(place[i][k], 50, 160); /* 100 +- 5 sigma */
    tsh_close(ctx);
}

static int refused_samplers(tsh_ctx *ctx, void *user) {
    tsh_sampler s = {.count = 10, .batch = 3};
    (void)user;
    CHECK_TRUE(tsh_sampler_next(ctx, NULL) == -1);
    CHECK_SAYS(TSH_ERR_ARGUMENT, "tsh_sampler_next: the sampler is NULL");
    CHECK_TRUE(tsh_sampler_next(ctx, &s) == 3 && tsh_sampler_index(ctx, &s, s.mine) == -1);
    CHECK_SAYS(TSH_ERR_ARGUMENT, "tsh_sampler_index: sample 3; this replica has 3 of the batch");
    CHECK_TRUE(tsh_sampler_index(ctx, &s, -1) == -1);
    CHECK_SAYS(TSH_ERR_ARGUMENT, "tsh_sampler_index: sample -1");
    s.batch = 0;
    CHECK_TRUE(tsh_sampler_next(ctx, &s) == -1);
    CHECK_SAYS(TSH_ERR_ARGUMENT, "batches of 0 out of 10 samples");
    s.batch = 11;
    s.drop_last = 1;
    CHECK_TRUE(tsh_sampler_next(ctx, &s) == -1);
    CHECK_SAYS(TSH_ERR_ARGUMENT, "there is no batch of 11 in 10 samples");
    s.drop_last = 0;
    s.at = 12;
    CHECK_TRUE(tsh_sampler_next(ctx, &s) == -1);
    CHECK_SAYS(TSH_ERR_ARGUMENT, "at 12 of 10 samples");
    CHECK_TRUE(tsh_sampler_next(NULL, &s) == -1);
    s = (tsh_sampler){.count = (int64_t)1 << 60, .batch = 2};
    CHECK_TRUE(tsh_sampler_next(ctx, &s) == 2);
    CHECK_TRUE(tsh_sampler_index(ctx, &s, 0) != tsh_sampler_index(ctx, &s, 1));
    return 0;
}

static void what_a_sampler_refuses(void **state) {
    (void)state;
    ranks_run(1, refused_samplers, NULL);
}

/* ------------------------------------------------------------------ equal inputs */

typedef enum given { SAME, FROM, OWNED, WRITTEN, POINTER, VIEW, REPLICAS, GIVEN } given;

/* The data of this rank, which differ by `how` between the ranks of tp, or of dp. */
static tsh_tensor *data(tsh_ctx *ctx, given how) {
    const int odd = how == REPLICAS ? tsh_dp(ctx)->rank
                                    : how != SAME && tsh_tp(ctx)->rank == tsh_tp(ctx)->size - 1;
    tsh_real x[12];
    tsh_tensor *t;
    for (int i = 0; i < 12; i++) x[i] = (tsh_real)(i + (i == 7 && odd));
    switch (how) {
    case OWNED: return tsh_tensor_from(ctx, TSH_REAL, tsh_shape2(3, 4), tsh_replicated(), x);
    case WRITTEN:
        t = tsh_tensor_new(ctx, TSH_REAL, tsh_shape2(3, 4), tsh_replicated());
        (void)tsh_write(ctx, t, TSH_LOCAL, x, sizeof x);
        return t;
    case POINTER:
        t = tsh_zeros(ctx, tsh_shape2(3, 4));
        memcpy(tsh_data(ctx, t), x, sizeof x);
        return t;
    case VIEW: return tsh_transpose(tsh_from(ctx, x, tsh_shape2(4, 3), TSH_REAL), 0, 1);
    default: return tsh_from(ctx, x, tsh_shape2(3, 4), TSH_REAL);
    }
}

static int differing(tsh_ctx *ctx, void *user) {
    const given how = *(const given *)user;
    const int fails = how != SAME && how != REPLICAS && tsh_tp(ctx)->size > 1;
    const tsh_linear_desc linear = {.in = 4, .out = 6, .style = TSH_COLWISE};
    tsh_module *net = tsh_add_linear(tsh_root(ctx), "up", &linear);
    char want[200];
    (void)tsh_forward(net, data(ctx, how)); /* off: nobody looks */
    CHECK_TRUE(tsh_ok(ctx));
    CHECK_TRUE(tsh_check_replicas(tsh_root(ctx))); /* weights are equal */
    (void)tsh_barrier(tsh_world(ctx)); /* all are here before one fails */
    tsh_check_inputs(ctx, 1);
    if (how == REPLICAS) tsh_no_grad_begin(ctx);
    (void)tsh_forward(net, data(ctx, how));
    if (!fails) {
        CHECK_TRUE(tsh_ok(ctx));
        return 0;
    }
    (void)snprintf(want, sizeof want,
                   "up: tsh_linear: x %s (3, 4) R has other values on rank %d of tp",
                   sizeof(tsh_real) == 8 ? "f64" : "f32", tsh_tp(ctx)->size - 1);
    CHECK(tsh_last_error(ctx)->code == TSH_ERR_STATE, "it is found");
    CHECK(strstr(tsh_last_error(ctx)->message, want), "%s", want);
    CHECK_TRUE(strstr(tsh_last_error(ctx)->message, "choose it by tsh_dp(ctx)->rank"));
    return 0;
}

static void ranks_that_were_given_other_data_are_named(void **state) {
    static const int tps[] = {1, 2, 3};
    (void)state;
    for (int how = SAME; how < GIVEN; how++)
        for (int i = 0; i < COUNT(tps); i++) {
            const tsh_desc desc = {.tp = tps[i]};
            given g = (given)how;
            ranks_run_with(2 * tps[i], &desc, differing, &g);
        }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_step_tensor_from_memory),
        cmocka_unit_test(owned_tensors_that_grow_are_told),
        cmocka_unit_test(an_epoch_takes_every_sample_once),
        cmocka_unit_test(orders_differ_and_go_on),
        cmocka_unit_test(orders_are_fair),
        cmocka_unit_test(what_a_sampler_refuses),
        cmocka_unit_test(ranks_that_were_given_other_data_are_named),
    };
    return cmocka_run_group_tests_name("unit/data", tests, NULL, NULL);
}
