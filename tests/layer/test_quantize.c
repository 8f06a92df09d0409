/* tsh_quantize at every degree of tp: the bytes are those of the whole weight, column-parallel
 * products have the bits of whole ones; row-parallel ones, lookups and tied weights are right; and
 * every mistake is told before anything changes. */
#include "../../tshard.h"
#include "../../backends/tshard_threads.h"
#include "../support/ranks.h"
#include "../support/files.h"

enum { KINDS = 3 };
static tsh_dtype kinds[KINDS] = {TSH_Q8_0, TSH_Q4_0, TSH_Q4_1};
enum { IN = 320, OUT = 70, VOCAB = 45, ROWS = 5 };

/* A parameter's global values: the same at every degree, and no two rows alike. */
static int set_values(tsh_ctx *ctx, tsh_tensor *t) {
    const size_t n = (size_t)tsh_numel(t);
    tsh_real *values = (tsh_real *)malloc(n * sizeof *values);
    tsh_result result;
    for (size_t e = 0; e < n; e++)
        values[e] = (tsh_real)((double)(ranks_mix(3, e) % 2001) / 1000 - 1.0005);
    result = tsh_write(ctx, t, TSH_GLOBAL, values, n * sizeof *values);
    free(values);
    return result == TSH_OK;
}

static tsh_module *add_layer(tsh_ctx *ctx, const char *name, tsh_style style, int64_t unit,
                             int reversed) {
    tsh_linear_desc d = {.in = IN, .out = OUT, .style = style, .unit = unit, .reversed = reversed};
    tsh_module *m = tsh_add_linear(tsh_root(ctx), name, &d);
    if (!m) return NULL;
    return set_values(ctx, tsh_param(m, "weight")) && set_values(ctx, tsh_param(m, "bias")) ? m
                                                                                           : NULL;
}

static tsh_tensor *some_rows(tsh_ctx *ctx) {
    tsh_tensor *x = tsh_tensor_new(ctx, TSH_REAL, tsh_shape2(ROWS, IN), tsh_replicated());
    return x && ranks_set(ctx, x, 9) == TSH_OK ? x : NULL;
}

/* Whether the bytes of t, cut along its rows (dim 0) or within them (dim 1) in blocks, are those of
 * `whole` that t's rank owns. */
static int has_bytes_of(tsh_ctx *ctx, tsh_tensor *t, tsh_tensor *whole) {
    const tsh_layout layout = tsh_layout_of(t);
    const char *part = (const char *)tsh_data(ctx, t), *all = (const char *)tsh_data(ctx, whole);
    const size_t block = tsh_dtype_size(tsh_dtype_of(t));
    const int cut = layout.kind == TSH_SHARDED ? layout.dim : -1;
    tsh_range range[TSH_MAX_SEGMENTS] = {{0, 0}};
    int64_t rows = tsh_local_size(t, 0), blocks = tsh_local_size(t, 1) / 32, r, first_row, first;
    if (tsh_dtype_of(t) != tsh_dtype_of(whole)) return 0;
    if (cut >= 0)
        (void)tsh_shard_range(layout, tsh_size(t, cut), tsh_tp(ctx)->size, tsh_tp(ctx)->rank,
                              range);
    first_row = cut == 0 ? range[0].start : 0;
    first = cut == 1 ? range[0].start / 32 : 0;
    for (r = 0; r < rows && blocks; r++)
        if (memcmp(part + (size_t)(r * blocks) * block,
                   all + (size_t)((first_row + r) * (tsh_size(t, 1) / 32) + first) * block,
                   (size_t)blocks * block) != 0)
            return 0;
    return 1;
}

/* The largest difference, relative to the values' own size. */
static double distance(tsh_ctx *ctx, tsh_tensor *a, tsh_tensor *b) {
    double *x = ranks_values(ctx, a), *y = ranks_values(ctx, b), most = 0, size = 1e-30;
    for (int64_t e = 0; x && y && e < tsh_numel(a); e++) {
        most = fmax(most, fabs(x[e] - y[e]));
        size = fmax(size, fabs(y[e]));
    }
    if (!x || !y) most = 1e9;
    free(x);
    free(y);
    return most / size;
}

/* user: the dtype. */
static int layers_agree(tsh_ctx *ctx, void *user) {
    const tsh_dtype dtype = *(const tsh_dtype *)user;
    const double loss = dtype == TSH_Q8_0 ? 0.01 : 0.1; /* of quantising w and x */
    tsh_module *plain = add_layer(ctx, "plain", TSH_PLAIN, 0, 0);
    tsh_module *reversed = add_layer(ctx, "reversed", TSH_COLWISE, 0, 1);
    tsh_module *unquantised = add_layer(ctx, "other.", TSH_PLAIN, 0, 0);
    CHECK(!unquantised, "a name with a dot");
    tsh_clear_error(ctx);
    unquantised = add_layer(ctx, "other", TSH_PLAIN, 0, 0);
    tsh_module *column = add_layer(ctx, "column", TSH_COLWISE, 0, 0);
    tsh_module *row = add_layer(ctx, "row", TSH_ROWWISE, 32, 0);
    tsh_tensor *x = some_rows(ctx), *want, *y, *whole, *w;
    CHECK_TRUE(plain && reversed && unquantised && column && row && x);
    CHECK_TRUE(tsh_quantize(tsh_root(ctx), "[!o]*", dtype) == TSH_OK);
    CHECK_OK();
    whole = tsh_param(plain, "weight");
    CHECK_TRUE(tsh_dtype_of(whole) == dtype);
    CHECK_TRUE(tsh_dtype_of(tsh_param(unquantised, "weight")) == TSH_REAL);
    CHECK_TRUE(tsh_dtype_of(tsh_param(plain, "bias")) == TSH_REAL);
    CHECK_TRUE(has_bytes_of(ctx, tsh_param(column, "weight"), whole));
    CHECK_TRUE(has_bytes_of(ctx, tsh_param(row, "weight"), whole));
    tsh_no_grad_begin(ctx);
    want = tsh_forward(plain, x);
    CHECK_TRUE(distance(ctx, want, tsh_forward(unquantised, x)) < loss);
    y = tsh_forward(column, x);
    CHECK(distance(ctx, y, want) <= 0, "the same bits");
    y = tsh_forward(row, x);
    CHECK_TRUE(distance(ctx, y, want) < 1e-5);
    w = tsh_param(reversed, "weight");
    CHECK(tsh_size(w, 0) == OUT && tsh_size(w, 1) == IN, "stored (out, in) now");
    y = tsh_forward(reversed, x);
    CHECK_TRUE(tsh_layout_of(y).kind == TSH_SHARDED || tsh_tp(ctx)->size == 1);
    tsh_no_grad_end(ctx);
    CHECK(tsh_quantize(tsh_root(ctx), "plain", TSH_Q8_0) == TSH_OK, "stays as it is");
    CHECK_TRUE(tsh_dtype_of(whole) == dtype);
    CHECK_TRUE(tsh_check_replicas(tsh_root(ctx)));
    CHECK_OK();
    return 0;
}

static void layers_agree_at_every_degree(void **state) {
    (void)state;
    for (int d = 0; d < COUNT(ranks_degrees); d++)
        for (int k = 0; k < KINDS; k++)
            ranks_run(ranks_degrees[d], layers_agree, (void *)&kinds[k]);
}

/* A reversed weight becomes what the same weight, stored the other way round, becomes. */
static int reversed_is_transposed(tsh_ctx *ctx, void *user) {
    const tsh_linear_desc one = {.in = 64, .out = 96, .style = TSH_ROWWISE, .unit = 32};
    const tsh_linear_desc two = {.in = 64, .out = 96, .style = TSH_ROWWISE, .unit = 32,
                                 .reversed = 1};
    tsh_module *a = tsh_add_linear(tsh_root(ctx), "a", &one);
    tsh_module *b = tsh_add_linear(tsh_root(ctx), "b", &two);
    tsh_real across[64 * 96], values[64 * 96];
    (void)user;
    for (int i = 0; i < 64 * 96; i++) values[i] = (tsh_real)ranks_number(4, (uint64_t)i);
    for (int o = 0; o < 96; o++)
        for (int i = 0; i < 64; i++) across[i * 96 + o] = values[o * 64 + i];
    CHECK_TRUE(tsh_write(ctx, tsh_param(a, "weight"), TSH_GLOBAL, values, sizeof values) == TSH_OK);
    CHECK_TRUE(tsh_write(ctx, tsh_param(b, "weight"), TSH_GLOBAL, across, sizeof across) == TSH_OK);
    CHECK_TRUE(tsh_quantize(tsh_root(ctx), NULL, TSH_Q4_0) == TSH_OK);
    CHECK_TRUE(tsh_hash(ctx, tsh_param(a, "weight")) == tsh_hash(ctx, tsh_param(b, "weight")));
    CHECK_OK();
    return 0;
}

static void reversed_weights_are_turned(void **state) {
    (void)state;
    for (int d = 0; d < COUNT(ranks_degrees); d++)
        ranks_run(ranks_degrees[d], reversed_is_transposed, NULL);
}

/* A table by vocabulary or by features, and a classifier tied to it. Hashes are those of the whole
 * table at every degree, with or without values before. */
typedef struct table {
    tsh_dtype dtype;
    tsh_style style;
    int lazy, padding;
    uint64_t hash; /* at one rank */
} table;

static int tables_agree(tsh_ctx *ctx, void *user) {
    table *wanted = (table *)user;
    const tsh_embedding_desc d = {.count = VOCAB, .dim = 256, .style = wanted->style,
                                  .lookup = {.padding = wanted->padding, .padding_idx = 2}};
    const tsh_linear_desc head = {.in = 256, .out = 3};
    tsh_module *e = tsh_add_embedding(tsh_root(ctx), "table", &d), *c;
    tsh_tensor *w = tsh_param(e, "weight"), *ids, *y, *z;
    tsh_classifier_desc tied = {.in = 256, .classes = VOCAB, .weight = w, .bias = TSH_NO};
    uint64_t hash;
    c = tsh_add_classifier(tsh_root(ctx), "head", &tied);
    CHECK_TRUE(e && c && tsh_add_linear(tsh_root(ctx), "other", &head));
    if (!wanted->lazy) CHECK_TRUE(tsh_materialize(tsh_root(ctx)) == TSH_OK);
    CHECK_TRUE(tsh_quantize(tsh_root(ctx), "table", wanted->dtype) == TSH_OK);
    ids = tsh_arange(ctx, TSH_I64, 0, VOCAB, 2);
    tsh_no_grad_begin(ctx);
    y = tsh_forward(e, ids);
    CHECK_TRUE(tsh_dtype_of(w) == wanted->dtype && tsh_dtype_of(y) == TSH_REAL);
    z = tsh_full_tensor(tsh_forward(c, y)); /* a row looked up is most like itself */
    z = tsh_argmax(z, 1, 0);
    for (int i = wanted->padding ? 2 : 0; i < VOCAB / 2; i++)
        CHECK(((const int64_t *)tsh_data(ctx, z))[i] == 2 * i, "%d", i);
    tsh_no_grad_end(ctx);
    hash = tsh_hash(ctx, w);
    if (!wanted->hash) wanted->hash = hash;
    CHECK_TRUE(hash == wanted->hash);
    CHECK_OK();
    return 0;
}

static void tables_are_tied_and_agree(void **state) {
    static const tsh_style styles[3] = {TSH_PLAIN, TSH_ROWWISE, TSH_COLWISE};
    (void)state;
    for (int k = 0; k < 2 * KINDS; k++) { /* dtype, with or without a padding row */
        table t = {kinds[k % KINDS], TSH_PLAIN, 0, k / KINDS, 0};
        for (int s = 0; s < 3; s++)
            for (t.lazy = 0; t.lazy < 2; t.lazy++)
                for (int d = 0; d < COUNT(ranks_degrees); d++) {
                    /* 256 features by 3 ranks cut blocks */
                    if (styles[s] == TSH_COLWISE && ranks_degrees[d] == 3) continue;
                    t.style = styles[s];
                    ranks_run(ranks_degrees[d], tables_agree, &t);
                }
        table whole = {kinds[k % KINDS], TSH_PLAIN, 1, k / KINDS, t.hash};
        if (COUNT(ranks_degrees) > 1) ranks_run(1, tables_agree, &whole);
    }
}

static int mistakes(tsh_ctx *ctx, void *user) {
    const tsh_linear_desc narrow = {.in = 48, .out = 8}, wide = {.in = 96, .out = 64},
                          cut = {.in = 96, .out = 64, .style = TSH_ROWWISE};
    const tsh_plan_rule rule = {.path = "a", .style = TSH_COLWISE};
    tsh_module *root = tsh_root(ctx), *a = tsh_add_linear(root, "a", &wide);
    tsh_tensor *x = tsh_zeros(ctx, tsh_shape2(1, 96));
    const int two = tsh_tp(ctx)->size == 2;
    (void)user;
    CHECK_TRUE(tsh_quantize(root, "a", TSH_BF16) == TSH_ERR_DTYPE);
    CHECK_SAYS(TSH_ERR_DTYPE, "takes TSH_Q8_0, TSH_Q4_0 or TSH_Q4_1, not bf16");
    CHECK_TRUE(tsh_quantize(root, "b.*", TSH_Q8_0) == TSH_ERR_ARGUMENT);
    CHECK_SAYS(TSH_ERR_ARGUMENT, "\"b.*\" matches no linear or embedding layer");
    CHECK_TRUE(tsh_quantize(NULL, "a", TSH_Q8_0) == TSH_ERR_ARGUMENT);
    CHECK_TRUE(tsh_add_linear(root, "narrow", &narrow));
    CHECK_TRUE(tsh_quantize(root, NULL, TSH_Q8_0) == TSH_ERR_SHAPE);
    CHECK_SAYS(TSH_ERR_SHAPE, "\"narrow.weight\" (8, 48) R has rows of 48 elements");
    CHECK(tsh_dtype_of(tsh_param(a, "weight")) == TSH_REAL, "nothing is changed");
    CHECK_TRUE(tsh_add_linear(root, "cut", &cut));
    if (two) {
        CHECK_TRUE(tsh_quantize(root, "[ac]*", TSH_Q4_0) == TSH_ERR_LAYOUT);
        CHECK_SAYS(TSH_ERR_LAYOUT, "\"cut.weight\" (64, 96) S(1) is cut within a block of 32 of "
                                   "q4_0: rank 0 holds [0, 48)");
        CHECK(tsh_dtype_of(tsh_param(a, "weight")) == TSH_REAL, "nothing is changed");
    }
    CHECK_TRUE(tsh_forward(a, x) && tsh_quantize(root, "a", TSH_Q8_0) == TSH_ERR_STATE);
    CHECK_SAYS(TSH_ERR_STATE, "ops are recorded that use \"a.weight\"");
    CHECK_TRUE(tsh_step_end(ctx) == TSH_OK && tsh_quantize(root, "a", TSH_Q8_0) == TSH_OK);
    if (two) {
        CHECK_TRUE(tsh_parallelize(root, &rule, 1) == TSH_ERR_STATE);
        CHECK_SAYS(TSH_ERR_STATE, "\"a.weight\" is quantised");
    }
    CHECK_TRUE(tsh_reset_parameters(a) == TSH_ERR_DTYPE);
    CHECK_SAYS(TSH_ERR_DTYPE, "\"a.weight\" is quantised");
    return 0;
}

static int tied_mistakes(tsh_ctx *ctx, void *user) {
    const tsh_linear_desc across = {.in = 64, .out = 64, .reversed = 1},
                          square = {.in = 64, .out = 64};
    tsh_module *root = tsh_root(ctx), *a = tsh_add_linear(root, "a", &square);
    tsh_module *b = tsh_add_linear(root, "b", &across), *c = tsh_add_module(root, "c", NULL), *d;
    (void)user;
    CHECK_TRUE(tsh_tie(b, "weight", tsh_param(a, "weight")) == TSH_OK);
    CHECK_TRUE(tsh_quantize(root, "a", TSH_Q8_0) == TSH_ERR_ARGUMENT);
    CHECK_SAYS(TSH_ERR_ARGUMENT, "\"b\", which stores it the other way round");
    d = tsh_add_linear(root, "d", &square);
    CHECK_TRUE(d && tsh_add_param(c, "p", tsh_shape2(64, 64), NULL));
    CHECK_TRUE(tsh_tie(tsh_child(c, 0), "", tsh_param(d, "weight")) == TSH_OK);
    CHECK_TRUE(tsh_quantize(root, "d", TSH_Q8_0) == TSH_ERR_ARGUMENT);
    CHECK_SAYS(TSH_ERR_ARGUMENT, "\"c.p\", which takes no quantised one");
    return 0;
}

/* An optimiser that has the weight refuses; one made later leaves it out, and trains the rest. */
static int trains_the_rest(tsh_ctx *ctx, void *user) {
    const tsh_linear_desc first = {.in = 32, .out = 64, .style = TSH_COLWISE},
                          second = {.in = 64, .out = 4, .style = TSH_ROWWISE};
    const tsh_optim_desc sgd = {.kind = TSH_SGD, .lr = 0.1};
    tsh_module *root = tsh_root(ctx), *one = tsh_add_module(root, "one", NULL);
    tsh_module *a = tsh_add_linear(one, "a", &first), *b = tsh_add_linear(one, "b", &second);
    tsh_tensor *x = tsh_keep(tsh_ones(ctx, tsh_shape2(2, 32))), *loss;
    uint64_t hash, bias;
    tsh_optim *optim;
    (void)user;
    CHECK_TRUE(tsh_quantize(one, "b", TSH_Q8_0) == TSH_OK && tsh_materialize(root) == TSH_OK);
    hash = tsh_hash(ctx, tsh_param(b, "weight"));
    bias = tsh_hash(ctx, tsh_param(a, "bias"));
    CHECK_TRUE((optim = tsh_optim_new(one, &sgd)) != NULL);
    loss = tsh_sum(tsh_forward(one, x), TSH_ALL, 0);
    CHECK_TRUE(tsh_backward(ctx, loss) == TSH_OK && tsh_optim_step(optim) == TSH_OK);
    CHECK(tsh_hash(ctx, tsh_param(b, "weight")) == hash, "has no gradient");
    CHECK(tsh_hash(ctx, tsh_param(a, "bias")) != bias, "is trained through it");
    CHECK_TRUE(tsh_grad(tsh_param(b, "weight")) == NULL);
    tsh_zero_grads(root);
    CHECK_TRUE(tsh_step_end(ctx) == TSH_OK);
    CHECK_TRUE(tsh_quantize(one, "a", TSH_Q8_0) == TSH_ERR_STATE);
    CHECK_SAYS(TSH_ERR_STATE, "\"one.a.weight\" is updated by an optimiser");
    return 0;
}

static void mistakes_are_told(void **state) {
    (void)state;
    ranks_run(1, mistakes, NULL);
    ranks_run(2, mistakes, NULL);
    ranks_run(1, tied_mistakes, NULL);
}

/* ------------------------------------------------------------- files */

typedef struct filing {
    tsh_dtype kind; /* of the model */
    int ranks;
    char own[24], plain[24]; /* the quantised model's file; that of the weights before */
} filing;

static tsh_module *filed_model(tsh_ctx *ctx) {
    tsh_module *root = tsh_root(ctx);
    if (!add_layer(ctx, "column", TSH_COLWISE, 0, 0) || !add_layer(ctx, "row", TSH_ROWWISE, 32, 0))
        return NULL;
    return root;
}

static int differ(tsh_ctx *ctx, const uint64_t *hash) {
    return tsh_hash(ctx, tsh_param(tsh_root(ctx), "column.weight")) != hash[0] ||
           tsh_hash(ctx, tsh_param(tsh_root(ctx), "row.weight")) != hash[1];
}

static int files_keep(tsh_ctx *ctx, void *user) {
    static const tsh_file_desc f32 = {.dtype = TSH_F32}, strict = {.strict_dtype = 1};
    const filing *f = (const filing *)user;
    tsh_module *root = filed_model(ctx);
    tsh_tensor *column = tsh_param(root, "column.weight"), *row = tsh_param(root, "row.weight");
    uint64_t hash[2];
    CHECK(tsh_save(root, files_path(f->plain), NULL) == TSH_OK, "save");
    CHECK(tsh_quantize(root, NULL, f->kind) == TSH_OK, "quantize");
    hash[0] = tsh_hash(ctx, column);
    hash[1] = tsh_hash(ctx, row);
    CHECK(tsh_save(root, files_path(f->own), NULL) == TSH_OK, "save");
    CHECK(tsh_save_with(root, files_path("wide"), NULL, &f32) == TSH_OK, "save dequantised");
    memset(tsh_data(ctx, column), 0, (size_t)tsh_local_numel(column) / 32 * 18);
    memset(tsh_data(ctx, row), 0, (size_t)tsh_local_numel(row) / 32 * 18);
    CHECK(differ(ctx, hash), "zeros");
    CHECK(tsh_load_with(root, files_path(f->own), NULL, &strict) == TSH_OK, "load");
    CHECK(!differ(ctx, hash), "the same bytes");
    CHECK(tsh_load_with(root, files_path(f->plain), NULL, &strict) == TSH_ERR_DTYPE, "strict");
    CHECK_SAYS(TSH_ERR_DTYPE, "without .strict_dtype it is converted");
    memset(tsh_data(ctx, row), 0, (size_t)tsh_local_numel(row) / 32 * 18);
    CHECK(tsh_load(root, files_path(f->plain), NULL) == TSH_OK, "loading quantises");
    CHECK(!differ(ctx, hash), "as tsh_quantize does");
    return 0;
}

/* A quantised file in a model that is not quantised has the values of a dequantised file. */
static int files_dequantise(tsh_ctx *ctx, void *user) {
    const filing *f = (const filing *)user;
    tsh_module *root = filed_model(ctx);
    uint64_t hash[2];
    CHECK(tsh_load(root, files_path("wide"), NULL) == TSH_OK, "load");
    hash[0] = tsh_hash(ctx, tsh_param(root, "column.weight"));
    hash[1] = tsh_hash(ctx, tsh_param(root, "row.weight"));
    CHECK(set_values(ctx, tsh_param(root, "row.weight")), "other values");
    CHECK(differ(ctx, hash), "other values");
    CHECK(tsh_load(root, files_path(f->own), NULL) == TSH_OK, "load");
    CHECK(!differ(ctx, hash), "the same values");
    return 0;
}

/* A model that cuts a row within a block cannot take the file of a quantised one. */
static int files_refuse(tsh_ctx *ctx, void *user) {
    const filing *f = (const filing *)user;
    CHECK(add_layer(ctx, "column", TSH_COLWISE, 0, 0) && add_layer(ctx, "row", TSH_ROWWISE, 5, 0),
          "model");
    CHECK(tsh_load(tsh_root(ctx), files_path(f->own), NULL) == TSH_ERR_LAYOUT, "load");
    CHECK_SAYS(TSH_ERR_LAYOUT, "is cut within a block of 32");
    return 0;
}

static void files_hold_the_blocks(void **state) {
    static const char *const names[KINDS] = {"q8_0", "q4_0", "q4_1"};
    filing f;
    files_bytes file;
    char text[64];
    (void)state;
    for (int k = 0; k < KINDS; k++) {
        for (f.ranks = 1; f.ranks <= 4; f.ranks++) {
            f.kind = kinds[k];
            snprintf(f.own, sizeof f.own, "own%d", f.ranks);
            snprintf(f.plain, sizeof f.plain, "plain%d", f.ranks);
            ranks_run_at(RANKS_FIRST, f.ranks, NULL, files_keep, &f);
            ranks_run_at(RANKS_FIRST, f.ranks, NULL, files_dequantise, &f);
            if (FILES_MINE) files_expect_same("own1", f.own);
        }
        ranks_run_at(RANKS_FIRST, 3, NULL, files_refuse, &f);
        if (!FILES_MINE) continue; /* the other processes of an mpirun */
        file = files_read("own1");
        snprintf(text, sizeof text, "\"tshard.dtype.row.weight\":\"%s\"", names[k]);
        assert_non_null(strstr(file.at + 8, text));
        snprintf(text, sizeof text, "{\"dtype\":\"U8\",\"shape\":[70,%d]",
                 10 * (int)tsh_dtype_size(kinds[k]));
        assert_non_null(strstr(file.at + 8, text));
        files_free(&file);
        files_clear();
    }
}

static void optimisers_leave_them_out(void **state) {
    (void)state;
    ranks_run(1, trains_the_rest, NULL);
    ranks_run(2, trains_the_rest, NULL);
}

/* Memory is what the bytes take, and the summary says so. */
static int memory_shrinks(tsh_ctx *ctx, void *user) {
    const tsh_linear_desc d = {.in = 1024, .out = 1024, .bias = TSH_NO};
    FILE *file = tmpfile();
    char text[1024] = "";
    (void)user;
    CHECK_TRUE(file && tsh_add_linear(tsh_root(ctx), "a", &d));
    CHECK_TRUE(tsh_materialize(tsh_root(ctx)) == TSH_OK);
    CHECK_TRUE(tsh_quantize(tsh_root(ctx), "a", TSH_Q4_0) == TSH_OK);
    CHECK_TRUE(tsh_mem_stats(ctx).now[TSH_MEM_PARAMETERS] < 1024 * 1024 / 32 * 18 + 4096);
    CHECK_TRUE(tsh_summary(tsh_root(ctx), file) == TSH_OK);
    rewind(file);
    CHECK_TRUE(fread(text, 1, sizeof text - 1, file) > 0 && strstr(text, " 589824\n"));
    (void)fclose(file);
    return 0;
}

static void memory_is_that_of_the_bytes(void **state) {
    (void)state;
    ranks_run(1, memory_shrinks, NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(layers_agree_at_every_degree),
        cmocka_unit_test(reversed_weights_are_turned),
        cmocka_unit_test(tables_are_tied_and_agree),
        cmocka_unit_test(mistakes_are_told),
        cmocka_unit_test(files_hold_the_blocks),
        cmocka_unit_test(optimisers_leave_them_out),
        cmocka_unit_test(memory_is_that_of_the_bytes),
    };
    return cmocka_run_group_tests(tests, files_begin, files_end);
}
