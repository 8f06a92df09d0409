/* tsh_save and tsh_load between the floating dtypes: every value is rounded once, at every degree;
 * exact weights of bf16 parameters; what is refused. */
/* build: double */
#define TSHARD_IMPLEMENTATION
#include "../../tshard.h"
#include "../../backends/tshard_threads.h"
#include "../support/ranks.h"
#include "../support/unit.h"
#include "../support/files.h"
#include "../support/short_floats.h"

enum { VALUES = 96 }; /* of every tensor of dtypes.safetensors */

static const tsh_dtype floats[] = {TSH_F32, TSH_F64, TSH_BF16, TSH_F16};
static const tsh_real numbers[4] = {1, -2, 3, (tsh_real)0.1};

/* What tests/golden/dtypes.py wrote, by the safetensors package. */
static char golden[1024];

static int begin(void **state) {
    const char *slash = strrchr(__FILE__, '/');
    (void)snprintf(golden, sizeof golden, "%.*s/../golden/dtypes.safetensors",
                   slash ? (int)(slash - __FILE__) : 1, slash ? __FILE__ : ".");
    return files_begin(state);
}

/* Adds a parameter of a dtype that need not compute. exact 1: an optimiser keeps its floats. */
static tsh_tensor *add(tsh_ctx *ctx, const char *name, int64_t count, tsh_dtype dtype, int exact) {
    const tsh_layout cut = tsh_sharded(0);
    const tsh_param_desc desc = {.layout = &cut};
    tsh_tensor *t = tsh_add_param(tsh_root(ctx), name, tsh_shape1(count), &desc);
    if (!t) return NULL;
    t->dtype = dtype;
    if (exact) t->flags |= TSHI_OPTIMISED;
    t->block = tshi_mem_alloc(ctx, TSH_MEM_PARAMETERS,
                              tshi_dtype_bytes(dtype, tsh_local_numel(t)));
    if (t->block) memset(tshi_mem_data(t->block), 0, tshi_dtype_bytes(dtype, tsh_local_numel(t)));
    return t;
}

static const void *bytes_of(const tsh_tensor *t) { return tshi_mem_data(t->block); }

/* ------------------------------------------------------------- every pair of dtypes */

typedef struct pair {
    tsh_dtype from, to;
    const char *saved; /* what it writes */
} pair;

/* Loads the golden values of `prefix` into t, which has their dtype. */
static tsh_result load_golden(tsh_tensor *t, const char *prefix, int strict) {
    const tsh_file_desc desc = {.prefix = prefix, .strict_dtype = strict};
    return tsh_load_with(tsh_root(t->ctx), golden, NULL, &desc);
}

static int convert_pair(tsh_ctx *ctx, void *user) {
    const pair *p = (const pair *)user;
    const char *from = tshi_dtype_name(p->from), *to = tshi_dtype_name(p->to);
    const tsh_file_desc saving = {.prefix = "x", .dtype = p->to},
                        loading = {.prefix = "x", .strict_dtype = 1};
    tsh_tensor *t = add(ctx, "values", VALUES, p->to, 0);
    const size_t bytes = tshi_dtype_bytes(p->to, tsh_local_numel(t));
    char name[32], want[VALUES * sizeof(double)];
    (void)snprintf(name, sizeof name, "%s_as_%s", from, to);
    CHECK(load_golden(t, p->from == p->to ? from : name, 1) == TSH_OK, "the rounded values");
    memcpy(want, bytes_of(t), bytes);
    memset(tshi_mem_data(t->block), 0x55, bytes);
    CHECK(load_golden(t, from, 0) == TSH_OK, "loading converts");
    CHECK(memcmp(bytes_of(t), want, bytes) == 0, "%s is loaded as %s", from, to);
    t->dtype = p->from; /* a model of the other dtype */
    tshi_mem_release(ctx, t->block);
    t->block = NULL;
    CHECK(load_golden(t, from, 1) == TSH_OK, "the values");
    CHECK(tsh_save_with(tsh_root(ctx), p->saved, NULL, &saving) == TSH_OK, "save");
    t->dtype = p->to;
    tshi_mem_release(ctx, t->block);
    t->block = NULL;
    CHECK(tsh_load_with(tsh_root(ctx), p->saved, NULL, &loading) == TSH_OK, "load");
    CHECK(memcmp(bytes_of(t), want, bytes) == 0, "%s is saved as %s", from, to);
    return 0;
}

static void every_pair_of_dtypes_is_rounded_once(void **state) {
    char name[16];
    pair p;
    (void)state;
    for (int i = 0; i < COUNT(floats); i++)
        for (int k = 0; k < COUNT(floats); k++)
            for (int ranks = 1; ranks <= 5; ranks++) { /* 96 is no multiple of 5 */
                (void)snprintf(name, sizeof name, "pair%d", ranks);
                p.from = floats[i];
                p.to = floats[k];
                p.saved = files_path(name);
                ranks_run(ranks, convert_pair, &p);
                files_expect_same("pair1", name);
            }
}

/* ------------------------------------------------------------- exact weights */

enum { EXACT = 1001 };

/* Element e of the whole tensor, a float; some lie midway between two bf16. */
static tsh_real exact_value(int64_t e) {
    const uint64_t r = tshi_rng_bits(30, 1, (uint64_t)e);
    const uint32_t low = e % 7 == 0 ? 0x8000u : e % 7 == 1 ? 0x7FFFu : (uint32_t)r & 0xFFFFu;
    return (tsh_real)tshi_dtype_float_of(((uint32_t)r & 0x80000000u) |
                                         (0x3A000000u + ((uint32_t)(r >> 8) & 0x07FF0000u)) | low);
}

static int64_t first_of(tsh_ctx *ctx, const tsh_tensor *t) {
    tshi_runs run = tshi_tensor_runs(t, tsh_tp(ctx)->rank, 0, tsh_numel(t));
    return tshi_tensor_next_run(&run) ? run.global : 0;
}

/* Sets t's exact weights to exact_value. */
static int set_exact(tsh_ctx *ctx, tsh_tensor *t) {
    tsh_real values[EXACT];
    const int64_t n = tsh_local_numel(t), first = first_of(ctx, t);
    for (int64_t e = 0; e < n; e++) values[e] = exact_value(first + e);
    return tshi_tensor_set_exact(t, 0, n, values);
}

/* Checks t's exact weights. rounded 1: they are exact_value rounded to bf16. */
static int expect_exact(tsh_ctx *ctx, const tsh_tensor *t, int rounded) {
    tsh_real values[EXACT];
    const int64_t n = tsh_local_numel(t), first = first_of(ctx, t);
    tshi_tensor_exact(t, 0, n, values);
    for (int64_t e = 0; e < n; e++) {
        const double exact = (double)exact_value(first + e);
        const double want = rounded ? short_value(&short_bf16, short_bits(&short_bf16, exact))
                                    : exact;
        CHECK((double)values[e] == want, "%d: element %lld is %.9g, not %.9g", rounded,
              (long long)(first + e), (double)values[e], want);
    }
    return 0;
}

typedef struct exact_job {
    const char *exact, *wide, *rounded; /* files: as tsh_save writes it, in F64, in BF16 */
} exact_job;

static int exact_weights(tsh_ctx *ctx, void *user) {
    static const tsh_file_desc f64 = {.dtype = TSH_F64}, bf16 = {.dtype = TSH_BF16},
                               strict = {.strict_dtype = 1};
    const exact_job *j = (const exact_job *)user;
    tsh_tensor *t = add(ctx, "w", EXACT, TSH_BF16, 1);
    tsh_module *root = tsh_root(ctx);
    CHECK(set_exact(ctx, t), "memory");
    CHECK(tsh_save(root, j->exact, NULL) == TSH_OK, "save");
    CHECK(tsh_save_with(root, j->wide, NULL, &f64) == TSH_OK, "save as f64");
    CHECK(tsh_save_with(root, j->rounded, NULL, &bf16) == TSH_OK, "save as bf16");
    CHECK(tsh_load_with(root, j->rounded, NULL, &strict) == TSH_OK, "load bf16");
    if (expect_exact(ctx, t, 1)) return 1;
    CHECK(tsh_load_with(root, j->exact, NULL, &strict) == TSH_OK, "F32 is its dtype, too");
    if (expect_exact(ctx, t, 0)) return 1;
    CHECK(tsh_load_with(root, j->wide, NULL, &strict) == TSH_ERR_DTYPE, "F64 is not");
    CHECK_SAYS(TSH_ERR_DTYPE, "\"w\" is F64 (1001) in ");
    tshi_tensor_forget_exact(t);
    CHECK(tsh_load(root, j->wide, NULL) == TSH_OK, "load f64");
    if (expect_exact(ctx, t, 0)) return 1;
    t->flags &= ~(unsigned)TSHI_OPTIMISED; /* a model for inference */
    tshi_mem_release(ctx, t->low);
    t->low = NULL;
    CHECK(tsh_load_with(root, j->exact, NULL, &strict) == TSH_ERR_DTYPE, "F32 is not its dtype");
    CHECK_SAYS(TSH_ERR_DTYPE, "BF16 (1001) in the model; without .strict_dtype it is converted");
    CHECK(tsh_load(root, j->exact, NULL) == TSH_OK, "load");
    CHECK(!t->low, "no exact weights");
    return expect_exact(ctx, t, 1);
}

static void exact_weights_come_back(void **state) {
    char names[3][24];
    exact_job j;
    files_bytes file;
    (void)state;
    for (int ranks = 1; ranks <= 4; ranks++) {
        for (int i = 0; i < 3; i++)
            (void)snprintf(names[i], sizeof names[i], "%s%d", i == 0   ? "exact"
                                                              : i == 1 ? "wide"
                                                                       : "rounded", ranks);
        j.exact = files_path(names[0]);
        j.wide = files_path(names[1]);
        j.rounded = files_path(names[2]);
        ranks_run(ranks, exact_weights, &j);
        files_expect_same("exact1", names[0]);
        files_expect_same("wide1", names[1]);
        files_expect_same("rounded1", names[2]);
    }
    file = files_read("exact1");
    assert_non_null(strstr(file.at + 8, "\"w\":{\"dtype\":\"F32\",\"shape\":[1001]"));
    files_free(&file);
    file = files_read("rounded1");
    assert_non_null(strstr(file.at + 8, "\"w\":{\"dtype\":\"BF16\",\"shape\":[1001]"));
    files_free(&file);
}

/* ------------------------------------------------------------- what is refused, and told */

static char heard[TSH_MESSAGE_SIZE];

static void hear(const char *message, void *user) {
    (void)user;
    strcpy(heard, message);
}

/* Integers keep their dtype in every file, and become no floats, nor floats integers. */
static void integers_are_not_converted(void **state) {
    static const tsh_file_desc saving = {.dtype = TSH_BF16};
    tsh_ctx *ctx = unit_open(NULL);
    tsh_tensor *t = add(ctx, "w", 4, TSH_I32, 0);
    int32_t *values = (int32_t *)tshi_mem_data(t->block);
    (void)state;
    for (int32_t i = 0; i < 4; i++) values[i] = 16777217 + i; /* no float */
    assert_int_equal(tsh_save_with(tsh_root(ctx), files_path("whole"), NULL, &saving), TSH_OK);
    memset(values, 0, 4 * sizeof *values);
    assert_int_equal(tsh_load(tsh_root(ctx), files_path("whole"), NULL), TSH_OK);
    for (int32_t i = 0; i < 4; i++) assert_int_equal(values[i], 16777217 + i);
    unit_close(ctx);
    for (int i = 0; i < COUNT(floats); i++) {
        ctx = unit_open(NULL);
        t = add(ctx, "w", 4, floats[i], 0);
        assert_int_equal(tsh_load(tsh_root(ctx), files_path("whole"), NULL), TSH_ERR_DTYPE);
        EXPECT(TSH_ERR_DTYPE, "(4) in the model; only F32, F64, BF16 and F16 are converted");
        assert_int_equal(tsh_save(tsh_root(ctx), files_path("float"), NULL), TSH_OK);
        t->dtype = TSH_I32;
        assert_int_equal(tsh_load(tsh_root(ctx), files_path("float"), NULL), TSH_ERR_DTYPE);
        EXPECT(TSH_ERR_DTYPE, "I32 (4) in the model; only F32, F64, BF16 and F16 are converted");
        t->dtype = TSH_I64;
        assert_int_equal(tsh_load(tsh_root(ctx), files_path("whole"), NULL), TSH_ERR_DTYPE);
        EXPECT(TSH_ERR_DTYPE, "\"w\" is I32 (4) in ");
        t->dtype = floats[i];
        unit_close(ctx);
    }
}

/* .dtype must be floating; .strict_dtype refuses what else is converted, and changes nothing. */
static void a_wrong_dtype_has_its_sentence(void **state) {
    static const tsh_file_desc whole = {.dtype = TSH_I64}, none = {.dtype = (tsh_dtype)99},
                               strict = {.strict_dtype = 1};
    tsh_ctx *ctx = unit_open(NULL);
    tsh_tensor *t = add(ctx, "w", 4, TSH_REAL, 0);
    uint64_t before;
    (void)state;
    assert_int_equal(tsh_write(ctx, t, TSH_GLOBAL, numbers, sizeof numbers), TSH_OK);
    before = tsh_hash(ctx, t);
    assert_int_equal(tsh_save_with(tsh_root(ctx), files_path("x"), NULL, &whole),
                     TSH_ERR_ARGUMENT);
    EXPECT(TSH_ERR_ARGUMENT, "tsh_save: .dtype is i64; parameters are written in TSH_F32,");
    assert_int_equal(tsh_save_with(tsh_root(ctx), files_path("x"), NULL, &none), TSH_ERR_ARGUMENT);
    EXPECT(TSH_ERR_ARGUMENT, "tsh_save: .dtype is none;");
    assert_int_equal(files_count(), 0);
    for (int i = 0; i < COUNT(floats); i++) {
        const tsh_file_desc saving = {.dtype = floats[i]};
        char part[96];
        assert_int_equal(tsh_save_with(tsh_root(ctx), files_path("x"), NULL, &saving), TSH_OK);
        if (floats[i] == TSH_REAL) {
            assert_int_equal(tsh_load_with(tsh_root(ctx), files_path("x"), NULL, &strict), TSH_OK);
            continue;
        }
        assert_int_equal(tsh_load_with(tsh_root(ctx), files_path("x"), NULL, &strict),
                         TSH_ERR_DTYPE);
        (void)snprintf(part, sizeof part, "tsh_load: \"w\" is %s (4) in \"",
                       tshi_dtypes[floats[i]].file);
        if (!strstr(tsh_last_error(ctx)->message, part))
            fail_msg("%s", tsh_last_error(ctx)->message);
        (void)snprintf(part, sizeof part, "%s (4) in the model; without .strict_dtype it is conv",
                       tshi_dtypes[TSH_REAL].file);
        EXPECT(TSH_ERR_DTYPE, part);
        assert_int_equal(tsh_hash(ctx, t), before);
    }
    unit_close(ctx);
}

/* Values beyond the range of f16 become infinite; the logger is told. */
static void what_f16_cannot_hold_is_told(void **state) {
    static const tsh_real large[] = {1e5, 65504, 65519, -65520};
    const tsh_desc desc = {.logger.log = hear};
    tsh_ctx *ctx = unit_open(&desc);
    tsh_tensor *t = add(ctx, "w", 4, TSH_REAL, 0);
    const uint16_t *h;
    (void)state;
    assert_int_equal(tsh_write(ctx, t, TSH_GLOBAL, large, sizeof large), TSH_OK);
    assert_int_equal(tsh_save(tsh_root(ctx), files_path("x"), NULL), TSH_OK);
    t->dtype = TSH_F16;
    assert_int_equal(tsh_load(tsh_root(ctx), files_path("x"), NULL), TSH_OK);
    h = (const uint16_t *)bytes_of(t);
    assert_true(h[0] == 0x7C00 && h[1] == 0x7BFF && h[2] == 0x7BFF && h[3] == 0xFC00);
    if (!strstr(heard, "\"w\" holds 0 NaN and 2 infinite values among the 4 that rank 0 read, "
                       "rounded from F") || !strstr(heard, " to F16"))
        fail_msg("%s", heard);
    unit_close(ctx);
}

static int odd_dtype(tsh_ctx *ctx, void *user) {
    const tsh_file_desc saving = {.dtype = tsh_world(ctx)->rank ? TSH_F16 : TSH_BF16};
    (void)user;
    CHECK(add(ctx, "w", 4, TSH_REAL, 0), "memory");
    CHECK(tsh_save_with(tsh_root(ctx), files_path("odd"), NULL, &saving) == TSH_ERR_ARGUMENT, "");
    CHECK_SAYS(TSH_ERR_ARGUMENT, "ranks hold different models or optimisers");
    return 0;
}

static void ranks_must_agree_on_the_dtype(void **state) {
    (void)state;
    ranks_run(2, odd_dtype, NULL);
    assert_int_equal(files_count(), 0);
}

#define TEST(f) cmocka_unit_test_teardown(f, files_after)

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(every_pair_of_dtypes_is_rounded_once),
        TEST(exact_weights_come_back),
        TEST(integers_are_not_converted),
        TEST(a_wrong_dtype_has_its_sentence),
        TEST(what_f16_cannot_hold_is_told),
        TEST(ranks_must_agree_on_the_dtype),
    };
    return cmocka_run_group_tests_name("io dtype", tests, begin, files_end);
}
