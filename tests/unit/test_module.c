/* The tree of modules: names, paths, parameters, ties, modes, forwards, and the patterns of plans.
 */
#define TSHARD_IMPLEMENTATION
#include "../../tshard.h"
#include "../../backends/tshard_threads.h"
#include "../support/ranks.h"
#include "../support/unit.h"

/* wte, h (0 (ln, up), 1 (ln, up)), head: as a small GPT. */
static tsh_module *model(tsh_ctx *ctx) {
    static const char *const names[] = {"0", "1"};
    tsh_embedding_desc wte = {.count = 7, .dim = 4};
    tsh_layer_norm_desc ln = {.dim = 4};
    tsh_linear_desc up = {.in = 4, .out = 6}, head = {.in = 4, .out = 7, .bias = TSH_NO};
    tsh_module *root = tsh_root(ctx), *h, *block;
    int i;
    (void)tsh_add_embedding(root, "wte", &wte);
    h = tsh_add_module(root, "h", NULL);
    for (i = 0; i < 2; i++) {
        block = tsh_add_module(h, names[i], NULL);
        (void)tsh_add_layer_norm(block, "ln", &ln);
        (void)tsh_add_linear(block, "up", &up);
    }
    (void)tsh_add_linear(root, "head", &head);
    return root;
}

/* ---------------------------------------------------------------------- tree */

static void modules_are_found_by_path(void **state) {
    tsh_ctx *ctx = unit_open(NULL);
    tsh_module *root = model(ctx), *h = tsh_find(root, "h");
    (void)state;
    assert_ptr_equal(tsh_root(ctx), root);
    assert_string_equal(tsh_module_path(root), "");
    assert_string_equal(tsh_module_path(h), "h");
    assert_string_equal(tsh_module_path(tsh_find(root, "h.1.up")), "h.1.up");
    assert_ptr_equal(tsh_find(h, "1.up"), tsh_find(root, "h.1.up"));
    assert_ptr_equal(tsh_find(h, ""), h);
    assert_ptr_equal(tsh_child(root, 0), tsh_find(root, "wte"));
    assert_ptr_equal(tsh_child(root, 2), tsh_find(root, "head"));
    assert_ptr_equal(tsh_child(h, 1), tsh_find(h, "1"));
    assert_null(tsh_child(root, 3));
    assert_null(tsh_child(root, -1));
    assert_null(tsh_child(NULL, 0));
    assert_string_equal(tsh_module_path(NULL), "");
    unit_close(ctx);
}

static void a_path_that_is_not_there_names_its_neighbours(void **state) {
    tsh_ctx *ctx = unit_open(NULL);
    tsh_module *root = model(ctx), *empty = tsh_add_module(root, "empty", NULL);
    (void)state;
    assert_null(tsh_find(root, "h.0.upp"));
    EXPECT(TSH_ERR_ARGUMENT, "tsh_find: \"\" has no module \"h.0.upp\"; near it are \"h.0.up\"");
    assert_null(tsh_find(tsh_find(root, "h"), "1.lm"));
    EXPECT(TSH_ERR_ARGUMENT, "\"h\" has no module \"1.lm\"; near it are \"1.ln\"");
    assert_null(tsh_find(root, "Head"));
    EXPECT(TSH_ERR_ARGUMENT, "near it are \"head\"");
    assert_null(tsh_find(empty, "x"));
    EXPECT(TSH_ERR_ARGUMENT, "no modules");
    assert_null(tsh_find(root, "h..0"));
    EXPECT(TSH_ERR_ARGUMENT, "tsh_find");
    assert_null(tsh_find(root, "h.0.up.weight"));
    EXPECT(TSH_ERR_ARGUMENT, "tsh_find");
    assert_null(tsh_find(NULL, "h"));
    unit_close(ctx);
}

static void names_are_checked(void **state) {
    static const char *const bad[] = {NULL, "", "a.b", "."};
    char longest[TSH_PATH_SIZE + 8];
    tsh_ctx *ctx = unit_open(NULL);
    tsh_module *root = tsh_root(ctx), *a = tsh_add_module(root, "a", NULL);
    tsh_linear_desc d = {.in = 1, .out = 1};
    int i;
    (void)state;
    for (i = 0; i < COUNT(bad); i++) {
        assert_null(tsh_add_module(a, bad[i], NULL));
        EXPECT(TSH_ERR_ARGUMENT, "is no name");
    }
    memset(longest, 'x', sizeof longest);
    longest[TSH_PATH_SIZE] = '\0';
    assert_null(tsh_add_module(a, longest, NULL));
    EXPECT(TSH_ERR_ARGUMENT, "is no name");
    assert_non_null(tsh_add_linear(a, "b", &d));
    assert_null(tsh_add_dropout(a, "b", 0.5));
    EXPECT(TSH_ERR_ARGUMENT, "tsh_add_dropout: \"a\" has a child \"b\" already");
    assert_non_null(tsh_add_module(root, "b", NULL)); /* another parent's */
    assert_null(tsh_add_module(NULL, "c", NULL));
    assert_null(tsh_child(a, 1));
    unit_close(ctx);
}

static void layers_want_their_description(void **state) {
    tsh_ctx *ctx = unit_open(NULL);
    tsh_module *root = tsh_root(ctx);
    (void)state;
    assert_null(tsh_add_linear(root, "a", NULL));
    EXPECT(TSH_ERR_ARGUMENT, "tsh_add_linear");
    assert_null(tsh_add_embedding(root, "a", NULL));
    EXPECT(TSH_ERR_ARGUMENT, "tsh_add_embedding");
    assert_null(tsh_add_layer_norm(root, "a", NULL));
    EXPECT(TSH_ERR_ARGUMENT, "tsh_add_layer_norm");
    assert_null(tsh_child(root, 0));
    unit_close(ctx);
}

/* ---------------------------------------------------------------- parameters */

static void parameters_are_found_by_name_and_path(void **state) {
    tsh_ctx *ctx = unit_open(NULL);
    tsh_module *root = model(ctx), *up = tsh_find(root, "h.1.up");
    (void)state;
    assert_ptr_equal(tsh_param(up, "weight"), tsh_param(root, "h.1.up.weight"));
    assert_ptr_equal(tsh_param(up, "bias"), tsh_param(tsh_find(root, "h"), "1.up.bias"));
    assert_int_equal(tsh_size(tsh_param(up, "weight"), 0), 6);
    assert_int_equal(tsh_size(tsh_param(up, "weight"), 1), 4);
    assert_int_equal(tsh_size(tsh_param(up, "bias"), 0), 6);
    assert_int_equal(tsh_size(tsh_param(root, "wte.weight"), 0), 7);
    assert_null(tsh_param(root, "head.bias"));
    EXPECT(TSH_ERR_ARGUMENT, "tsh_param: \"\" has no parameter \"head.bias\"");
    assert_null(tsh_param(up, "weights"));
    EXPECT(TSH_ERR_ARGUMENT, "tsh_param: \"h.1.up\" has no parameter \"weights\"");
    assert_null(tsh_param(root, "h.2.up.weight"));
    EXPECT(TSH_ERR_ARGUMENT, "tsh_param");
    assert_null(tsh_param(NULL, "weight"));
    unit_close(ctx);
}

/* The paths that tsh_each_param told, in order. */
typedef struct visit {
    char paths[512];
    tsh_tensor *seen[16];
    int count;
} visit;

static void note(const char *path, tsh_tensor *param, void *user) {
    visit *v = (visit *)user;
    tsh_text_add(v->paths, sizeof v->paths, "%s ", path);
    v->seen[v->count++] = param;
}

static void expect_params(tsh_module *module, const char *want) {
    visit v = {.count = 0};
    tsh_each_param(module, note, &v);
    assert_string_equal(v.paths, want);
}

static void parameters_are_visited_in_order(void **state) {
    tsh_ctx *ctx = unit_open(NULL);
    tsh_module *root = model(ctx);
    visit v = {.count = 0};
    (void)state;
    expect_params(root, "wte.weight h.0.ln.weight h.0.ln.bias h.0.up.weight h.0.up.bias "
                        "h.1.ln.weight h.1.ln.bias h.1.up.weight h.1.up.bias head.weight ");
    expect_params(tsh_find(root, "h.1"), "h.1.ln.weight h.1.ln.bias h.1.up.weight h.1.up.bias ");
    tsh_each_param(tsh_find(root, "head"), note, &v);
    assert_ptr_equal(v.seen[0], tsh_param(root, "head.weight"));
    tsh_each_param(NULL, note, &v);
    assert_int_equal(v.count, 1);
    unit_close(ctx);
}

static void layers_name_their_parameters_and_values(void **state) {
    tsh_ctx *ctx = unit_open(NULL);
    tsh_module *root = tsh_root(ctx);
    tsh_layer_norm_desc ln = {.dim = 2}, bare = {.dim = 2, .bias = TSH_NO};
    tsh_linear_desc d = {.in = 1, .out = 2};
    (void)state;
    d.weight_init.kind = d.bias_init.kind = TSH_INIT_CONSTANT;
    d.weight_init.a = 3;
    d.bias_init.a = -1;
    (void)tsh_add_layer_norm(root, "ln", &ln);
    (void)tsh_add_layer_norm(root, "bare", &bare);
    (void)tsh_add_dropout(root, "drop", 0.5);
    (void)tsh_add_linear(root, "lin", &d);
    expect_params(root, "ln.weight ln.bias bare.weight lin.weight lin.bias ");
    EXPECT_TEXT(tsh_param(root, "ln.weight"), "(2) R: 1 1");
    EXPECT_TEXT(tsh_param(root, "ln.bias"), "(2) R: 0 0");
    EXPECT_TEXT(tsh_param(root, "lin.weight"), "(2, 1) R: 3 / 3");
    EXPECT_TEXT(tsh_param(root, "lin.bias"), "(2) R: -1 -1");
    unit_close(ctx);
}

static size_t held(tsh_ctx *ctx) {
    return tsh_mem_stats(ctx).now[TSH_MEM_PARAMETERS];
}

static void parameters_take_memory_on_first_use(void **state) {
    tsh_ctx *ctx = unit_open(NULL);
    tsh_module *root = model(ctx), *up = tsh_find(root, "h.0.up");
    size_t one;
    uint64_t hash;
    (void)state;
    assert_int_equal(held(ctx), 0);
    assert_non_null(tsh_forward(up, tsh_ones(ctx, tsh_shape2(1, 4))));
    one = held(ctx);
    assert_true(one >= 30 * sizeof(tsh_real) && one < 30 * sizeof(tsh_real) + 256);
    hash = tsh_hash(ctx, tsh_param(up, "weight"));
    assert_int_equal(tsh_materialize(root), TSH_OK);
    assert_true(held(ctx) > 3 * one);
    assert_true(hash == tsh_hash(ctx, tsh_param(up, "weight"))); /* what is there stays */
    one = held(ctx);
    assert_int_equal(tsh_materialize(root), TSH_OK);
    assert_int_equal(held(ctx), one);
    assert_true(hash != tsh_hash(ctx, tsh_param(root, "h.1.up.weight"))); /* keyed by path */
    assert_int_equal(tsh_materialize(NULL), TSH_ERR_ARGUMENT);
    tsh_tensor_free(tsh_param(up, "weight")); /* a module's: stays */
    assert_int_equal(held(ctx), one);
    unit_close(ctx);
}

/* ---------------------------------------------------------------------- ties */

static void a_tied_parameter_counts_once(void **state) {
    tsh_ctx *ctx = unit_open(NULL);
    tsh_module *root = model(ctx);
    tsh_tensor *wte = tsh_param(root, "wte.weight");
    (void)state;
    assert_int_equal(tsh_tie(tsh_find(root, "head"), "weight", wte), TSH_OK);
    assert_ptr_equal(tsh_param(root, "head.weight"), wte);
    expect_params(root, "wte.weight h.0.ln.weight h.0.ln.bias h.0.up.weight h.0.up.bias "
                        "h.1.ln.weight h.1.ln.bias h.1.up.weight h.1.up.bias ");
    expect_params(tsh_find(root, "head"), "wte.weight ");                     /* below head too */
    assert_int_equal(tsh_tie(tsh_find(root, "head"), "weight", wte), TSH_OK); /* again: no change */
    assert_ptr_equal(tsh_param(root, "head.weight"), wte);
    unit_close(ctx);
}

static void both_uses_of_a_tied_parameter_give_gradients(void **state) {
    tsh_ctx *ctx = unit_open(NULL);
    tsh_linear_desc d = {.in = 2, .out = 2, .bias = TSH_NO};
    tsh_module *root = tsh_root(ctx), *a, *b;
    (void)state;
    d.weight_init.kind = TSH_INIT_ONES;
    a = tsh_add_linear(root, "a", &d);
    b = tsh_add_linear(root, "b", &d);
    assert_int_equal(tsh_tie(b, "weight", tsh_param(a, "weight")), TSH_OK);
    /* y = W W x with W = 1, x = (1, 2): dW = 1 (Wx)^T + (W^T 1) x^T = (3, 3) + 2 (1, 2) */
    assert_int_equal(
        tsh_backward(ctx, tsh_sum(tsh_forward(root, tsh_arange(ctx, TSH_REAL, 1, 3, 1)), 0, 0)),
        TSH_OK);
    EXPECT_TEXT(tsh_grad(tsh_param(b, "weight")), "(2, 2) R: 5 7 / 5 7");
    tsh_zero_grads(root);
    assert_null(tsh_grad(tsh_param(a, "weight")));
    unit_close(ctx);
}

static void ties_may_be_chained(void **state) {
    tsh_ctx *ctx = unit_open(NULL);
    tsh_linear_desc d = {.in = 2, .out = 2, .bias = TSH_NO};
    tsh_module *root = tsh_root(ctx), *a = tsh_add_linear(root, "a", &d),
               *b = tsh_add_linear(root, "b", &d), *c = tsh_add_linear(root, "c", &d);
    (void)state;
    assert_int_equal(tsh_tie(a, "weight", tsh_param(b, "weight")), TSH_OK);
    assert_int_equal(tsh_tie(b, "weight", tsh_param(c, "weight")), TSH_OK);
    assert_ptr_equal(tsh_param(b, "weight"), tsh_param(c, "weight"));
    assert_ptr_equal(tsh_param(a, "weight"), tsh_param(c, "weight"));
    expect_params(root, "c.weight ");
    assert_int_equal(tsh_materialize(root), TSH_OK);
    unit_close(ctx);
}

static void a_tie_may_name_a_relative_path(void **state) {
    tsh_ctx *ctx = unit_open(NULL);
    tsh_module *root = model(ctx);
    tsh_tensor *wte = tsh_param(root, "wte.weight");
    (void)state;
    assert_int_equal(tsh_tie(root, "head.weight", wte), TSH_OK);
    assert_ptr_equal(tsh_param(tsh_find(root, "head"), "weight"), wte);
    unit_close(ctx);
}

static void ties_that_cannot_be_are_refused(void **state) {
    tsh_ctx *ctx = unit_open(NULL), *other = unit_open(NULL);
    tsh_module *root = model(ctx), *head = tsh_find(root, "head");
    tsh_tensor *before = tsh_param(head, "weight");
    (void)state;
    assert_int_equal(tsh_tie(head, "weight", tsh_param(root, "h.0.up.weight")), TSH_ERR_SHAPE);
    EXPECT(TSH_ERR_SHAPE, "tsh_tie: \"head.weight\" is (7, 4) R, \"h.0.up.weight\" is (6, 4) R");
    assert_int_equal(tsh_tie(head, "weight", tsh_zeros(ctx, tsh_shape2(7, 4))), TSH_ERR_ARGUMENT);
    EXPECT(TSH_ERR_ARGUMENT, "tsh_tie: \"head.weight\" takes a parameter");
    assert_int_equal(tsh_tie(head, "weight", NULL), TSH_ERR_ARGUMENT);
    EXPECT(TSH_ERR_ARGUMENT, "tsh_tie");
    assert_int_equal(tsh_tie(head, "bias", before), TSH_ERR_ARGUMENT);
    EXPECT(TSH_ERR_ARGUMENT, "has no parameter \"bias\"");
    assert_int_equal(tsh_tie(head, "weight", tsh_param(model(other), "wte.weight")),
                     TSH_ERR_ARGUMENT);
    EXPECT(TSH_ERR_ARGUMENT, "tsh_tie");
    assert_int_equal(tsh_tie(NULL, "weight", before), TSH_ERR_ARGUMENT);
    assert_ptr_equal(tsh_param(head, "weight"), before);
    unit_close(other);
    unit_close(ctx);
}

/* --------------------------------------------------------------- modes, grads */

static void training_mode_reaches_everything_below(void **state) {
    tsh_ctx *ctx = unit_open(NULL);
    tsh_module *root = model(ctx), *h = tsh_find(root, "h"), *drop;
    tsh_tensor *x = tsh_ones(ctx, tsh_shape1(1000));
    (void)state;
    drop = tsh_add_dropout(tsh_find(h, "0"), "drop", 0.5);
    assert_int_equal(tsh_training(root), 1);
    assert_int_equal(tsh_training(drop), 1);
    assert_true(tsh_hash(ctx, tsh_forward(drop, x)) != tsh_hash(ctx, x));
    tsh_train(h, 0);
    assert_int_equal(tsh_training(root), 1);
    assert_int_equal(tsh_training(tsh_find(root, "wte")), 1);
    assert_int_equal(tsh_training(h), 0);
    assert_int_equal(tsh_training(drop), 0);
    assert_int_equal(tsh_training(tsh_find(h, "1.up")), 0);
    assert_int_equal(tsh_training(tsh_add_module(h, "late", NULL)), 0); /* as its parent */
    assert_ptr_equal(tsh_forward(drop, x), x);
    tsh_train(root, 1);
    assert_int_equal(tsh_training(drop), 1);
    assert_int_equal(tsh_training(NULL), 0);
    tsh_train(NULL, 1);
    unit_close(ctx);
}

static void zero_grads_forgets_all_below(void **state) {
    tsh_ctx *ctx = unit_open(NULL);
    tsh_module *root = model(ctx), *h0 = tsh_find(root, "h.0"), *h1 = tsh_find(root, "h.1");
    tsh_tensor *x = tsh_ones(ctx, tsh_shape2(1, 4));
    (void)state;
    (void)tsh_backward(ctx, tsh_sum(tsh_add(tsh_forward(h0, x), tsh_forward(h1, x)), TSH_ALL, 0));
    assert_non_null(tsh_grad(tsh_param(h0, "up.bias")));
    tsh_zero_grads(h0);
    assert_null(tsh_grad(tsh_param(h0, "up.bias")));
    assert_null(tsh_grad(tsh_param(h0, "up.weight")));
    EXPECT_TEXT(tsh_grad(tsh_param(h1, "up.bias")), "(6) R: 1 1 1 1 1 1");
    tsh_zero_grads(NULL);
    unit_close(ctx);
}

/* ------------------------------------------------------------------- forward */

static tsh_tensor *axpy(tsh_module *module, tsh_tensor **in, int n, void *user) {
    double factor = *(const double *)user;
    if (n == 1) return tsh_scale(tsh_forward(tsh_child(module, 0), in[0]), factor);
    return tsh_add(tsh_scale(in[0], factor), in[1]);
}

static tsh_linear_desc constant(double weight, double bias) {
    tsh_linear_desc d = {.in = 1, .out = 1};
    d.weight_init.kind = d.bias_init.kind = TSH_INIT_CONSTANT;
    d.weight_init.a = weight;
    d.bias_init.a = bias;
    return d;
}

static void containers_run_their_children_in_order(void **state) {
    tsh_ctx *ctx = unit_open(NULL);
    tsh_linear_desc doubled = constant(2, 0), next = constant(1, 1);
    tsh_module *root = tsh_root(ctx), *inner;
    tsh_tensor *x = tsh_full(ctx, tsh_shape1(1), 5);
    (void)state;
    assert_ptr_equal(tsh_forward(root, x), x); /* no children */
    (void)tsh_add_linear(root, "double", &doubled);
    inner = tsh_add_module(root, "inner", NULL);
    (void)tsh_add_linear(inner, "next", &next);
    (void)tsh_add_linear(root, "again", &doubled);
    EXPECT_TEXT(tsh_forward(root, x), "(1) R: 22"); /* (5 * 2 + 1) * 2 */
    EXPECT_TEXT(tsh_forward(inner, x), "(1) R: 6");
    unit_close(ctx);
}

static void a_container_s_forward_gets_inputs_and_user(void **state) {
    tsh_ctx *ctx = unit_open(NULL);
    double factor = 3;
    tsh_linear_desc next = constant(1, 1);
    tsh_module_desc d = {axpy, &factor};
    tsh_module *module = tsh_add_module(tsh_root(ctx), "axpy", &d);
    tsh_tensor *in[2];
    (void)state;
    (void)tsh_add_linear(module, "next", &next);
    in[0] = tsh_full(ctx, tsh_shape1(1), 2);
    in[1] = tsh_full(ctx, tsh_shape1(1), 10);
    EXPECT_TEXT(tsh_forward_n(module, in, 2), "(1) R: 16");
    EXPECT_TEXT(tsh_forward(module, in[0]), "(1) R: 9");
    EXPECT_TEXT(tsh_forward(tsh_root(ctx), in[0]), "(1) R: 9"); /* also as a child */
    unit_close(ctx);
}

static void forwards_refuse_what_they_cannot_take(void **state) {
    tsh_ctx *ctx = unit_open(NULL);
    tsh_linear_desc next = constant(1, 1);
    tsh_module *root = tsh_root(ctx), *inner = tsh_add_module(root, "inner", NULL),
               *lin = tsh_add_linear(inner, "lin", &next);
    tsh_tensor *x = tsh_ones(ctx, tsh_shape1(1)), *in[2];
    (void)state;
    in[0] = in[1] = x;
    assert_null(tsh_forward_n(inner, in, 2));
    EXPECT(TSH_ERR_ARGUMENT,
           "inner: tsh_forward: a container without a forward takes one input, not 2");
    assert_null(tsh_forward_n(lin, in, 2));
    EXPECT(TSH_ERR_ARGUMENT, "inner.lin: tsh_forward: takes one input, not 2");
    assert_null(tsh_forward_n(lin, in, 0));
    EXPECT(TSH_ERR_ARGUMENT, "inner.lin");
    assert_null(tsh_forward_n(lin, NULL, 1));
    EXPECT(TSH_ERR_ARGUMENT, "inner.lin");
    assert_null(tsh_forward(lin, NULL));
    EXPECT(TSH_ERR_ARGUMENT, "NULL");
    assert_null(tsh_forward(NULL, x));
    EXPECT(TSH_ERR_ARGUMENT, "tsh_forward");
    unit_close(ctx);
}

/* --------------------------------------------------------------------- plans */

static void patterns_match_whole_names(void **state) {
    static const struct {
        const char *pattern, *yes, *no; /* paths, separated by spaces */
    } rows[] = {{"h.0.up", "h.0.up", "h.0 h.0.up.x h.0.upp xh.0.up h.0"},
                {"h.*.up", "h.0.up h.11.up h.x.up", "h.up h.0.1.up h.0.u 0.up"},
                {"h.?.up", "h.0.up h.x.up", "h.11.up h.up"},
                {"h.1?.u*", "h.10.up h.19.u h.1x.uvw", "h.1.up h.100.up h.10.p"},
                {"*", "h wte", "h.0"},
                {"*.*", "h.0 a.b", "h h.0.up"},
                {"**", "h h.0 h.0.up", ""},
                {"**.up", "up h.up h.0.up", "h.0.ln h.up.x xup h.xup"},
                {"h.**", "h h.0 h.0.up", "x x.h wte hh"},
                {"h.**.up", "h.up h.0.up h.0.1.up", "h up h.0.up.x"},
                {"**.0.**", "0 h.0 0.up h.0.up h.0.0", "h.1.up h.00.up"},
                {"*a*b*", "ab xaxbx aab", "ba a b xa.bx"},
                {"a**b", "ab axxb", "a.b"}, /* ** means many names only as a name of its own */
                {"w[qkv]", "wq wk wv", "wo w wqq [qkv] w[qkv]"},
                {"h.[1-39]?.u", "h.10.u h.9x.u", "h.40.u h.1.u h.-0.u"},
                {"[!a-c]x", "dx -x", "ax cx x"},
                {"a[]b]", "a] ab", "a[ a"},
                {"a[-z]", "a- az", "ab"},
                {"a[b", "a[b", "ab a"}, /* no closing bracket: '[' stands for itself */
                {"*[12]", "h1 h12", "h h.1 h13"},
                {"", "", "h"}};
    char list[128], *word;
    int i;
    (void)state;
    for (i = 0; i < COUNT(rows); i++) {
        (void)snprintf(list, sizeof list, "%s", rows[i].yes);
        for (word = strtok(list, " "); word; word = strtok(NULL, " "))
            if (!tshi_glob_match(rows[i].pattern, word))
                fail_msg("\"%s\" must match \"%s\"", rows[i].pattern, word);
        (void)snprintf(list, sizeof list, "%s", rows[i].no);
        for (word = strtok(list, " "); word; word = strtok(NULL, " "))
            if (tshi_glob_match(rows[i].pattern, word))
                fail_msg("\"%s\" must not match \"%s\"", rows[i].pattern, word);
    }
    assert_true(tshi_glob_match("", ""));
    assert_true(tshi_glob_match("**", ""));
    assert_false(tshi_glob_match("*", ""));
}

static void expect_layout(tsh_module *root, const char *path, const char *want) {
    char text[64];
    tsh_layout layout = tsh_layout_of(tsh_param(root, path));
    assert_string_equal(tsh_layout_text(layout, text, sizeof text), want);
}

static void plans_give_layers_their_layouts(void **state) {
    static const tsh_plan_rule plan[] = {
        {.path = "h.*.up", .style = TSH_COLWISE, .segments = 3, .unit = 2},
        {.path = "wte", .style = TSH_ROWWISE},
        {.path = "**.head", .style = TSH_ROWWISE, .unit = 2}};
    tsh_ctx *ctx = unit_open(NULL);
    tsh_module *root = model(ctx);
    (void)state;
    assert_int_equal(tsh_parallelize(root, plan, COUNT(plan)), TSH_OK);
    expect_layout(root, "h.0.up.weight", "S(0, 3 segments, unit 2)");
    expect_layout(root, "h.1.up.bias", "S(0, 3 segments, unit 2)");
    expect_layout(root, "wte.weight", "S(0)");
    expect_layout(root, "head.weight", "S(1, unit 2)");
    expect_layout(root, "h.0.ln.weight", "R");
    unit_close(ctx);
}

static void plans_may_start_below_the_root(void **state) {
    static const tsh_plan_rule plan[] = {{.path = "*.up", .style = TSH_ROWWISE}};
    tsh_ctx *ctx = unit_open(NULL);
    tsh_module *root = model(ctx);
    (void)state;
    assert_int_equal(tsh_parallelize(tsh_find(root, "h"), plan, 1), TSH_OK);
    expect_layout(root, "h.1.up.weight", "S(1)");
    expect_layout(root, "h.1.up.bias", "R");
    unit_close(ctx);
}

static void plans_that_cannot_be_change_nothing(void **state) {
    static const struct {
        tsh_plan_rule rules[2];
        tsh_result code;
        const char *part;
    } rows[] = {
        {{{.path = "wte", .style = TSH_ROWWISE}, {.path = "h.*.upp", .style = TSH_COLWISE}},
         TSH_ERR_ARGUMENT,
         "rule \"h.*.upp\" matches no module that takes its style; near it are \"h."},
        {{{.path = "wte", .style = TSH_ROWWISE}, {.path = "h.*.ln", .style = TSH_ROWWISE}},
         TSH_ERR_ARGUMENT,
         "rule \"h.*.ln\" matches no module that takes its style"},
        {{{.path = "h.1.up", .style = TSH_ROWWISE}, {.path = "**.up", .style = TSH_COLWISE}},
         TSH_ERR_ARGUMENT,
         "rules \"h.1.up\" and \"**.up\" both match \"h.1.up\""},
        {{{.path = "wte", .style = TSH_ROWWISE},
          {.path = "h.*.up", .style = TSH_COLWISE, .unit = 4}},
         TSH_ERR_LAYOUT,
         "\"h.0.up.weight\" (6, 4) R does not divide into 1 segments of units of 4"},
        {{{.path = "wte", .style = TSH_ROWWISE},
          {.path = "h.*.up", .style = TSH_ROWWISE, .segments = 3}},
         TSH_ERR_LAYOUT,
         "does not divide into 3 segments"}};
    tsh_ctx *ctx = unit_open(NULL);
    tsh_module *root = model(ctx);
    int i;
    (void)state;
    for (i = 0; i < COUNT(rows); i++) {
        assert_int_equal(tsh_parallelize(root, rows[i].rules, 2), rows[i].code);
        EXPECT(rows[i].code, rows[i].part);
        expect_layout(root, "wte.weight", "R");
        expect_layout(root, "h.0.up.weight", "R");
        expect_layout(root, "h.1.up.weight", "R");
    }
    assert_int_equal(tsh_parallelize(NULL, rows[0].rules, 2), TSH_ERR_ARGUMENT);
    assert_int_equal(tsh_parallelize(root, NULL, 1), TSH_ERR_ARGUMENT);
    assert_int_equal(tsh_parallelize(root, NULL, 0), TSH_OK);
    unit_close(ctx);
}

static void a_tied_parameter_takes_one_layout(void **state) {
    static const tsh_plan_rule twice[] = {{.path = "wte", .style = TSH_ROWWISE},
                                          {.path = "head", .style = TSH_ROWWISE}};
    static const tsh_plan_rule once[] = {{.path = "wte", .style = TSH_ROWWISE},
                                         {.path = "head", .style = TSH_COLWISE}};
    tsh_ctx *ctx = unit_open(NULL);
    tsh_module *root = model(ctx);
    (void)state;
    (void)tsh_tie(tsh_find(root, "head"), "weight", tsh_param(root, "wte.weight"));
    assert_int_equal(tsh_parallelize(root, twice, 2), TSH_ERR_LAYOUT);
    EXPECT(TSH_ERR_LAYOUT, "the tied parameter \"wte.weight\" would be S(0) for \"wte\" and S(1) "
                           "for \"head\"");
    expect_layout(root, "wte.weight", "R");
    assert_int_equal(tsh_parallelize(root, once, 2), TSH_OK);
    expect_layout(root, "head.weight", "S(0)");
    unit_close(ctx);
}

/* Values that are there are sliced, and stay the same. */
static int slices_values(tsh_ctx *ctx, void *user) {
    static const tsh_plan_rule plan[] = {
        {.path = "h.*.up", .style = TSH_COLWISE, .segments = 3, .unit = 1},
        {.path = "wte", .style = TSH_ROWWISE},
        {.path = "head", .style = TSH_ROWWISE}};
    tsh_module *root = model(ctx);
    visit v = {.count = 0};
    uint64_t before[16];
    size_t whole;
    int i;
    (void)user;
    CHECK(tsh_materialize(root) == TSH_OK, "materialize");
    tsh_each_param(root, note, &v);
    for (i = 0; i < v.count; i++) before[i] = tsh_hash(ctx, v.seen[i]);
    whole = tsh_mem_stats(ctx).now[TSH_MEM_PARAMETERS];
    CHECK(tsh_parallelize(root, plan, COUNT(plan)) == TSH_OK, "parallelize");
    for (i = 0; i < v.count; i++)
        CHECK(tsh_hash(ctx, v.seen[i]) == before[i], "parameter %d changed", i);
    CHECK(tsh_local_size(tsh_param(root, "head.weight"), 1) <= 2, "a piece");
    CHECK(tsh_mem_stats(ctx).now[TSH_MEM_PARAMETERS] <= whole, "not more memory");
    CHECK_OK();
    return 0;
}

static void values_are_kept_by_a_plan(void **state) {
    (void)state;
    ranks_run(2, slices_values, NULL);
    ranks_run(3, slices_values, NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(modules_are_found_by_path),
        cmocka_unit_test(a_path_that_is_not_there_names_its_neighbours),
        cmocka_unit_test(names_are_checked),
        cmocka_unit_test(layers_want_their_description),
        cmocka_unit_test(parameters_are_found_by_name_and_path),
        cmocka_unit_test(parameters_are_visited_in_order),
        cmocka_unit_test(layers_name_their_parameters_and_values),
        cmocka_unit_test(parameters_take_memory_on_first_use),
        cmocka_unit_test(a_tied_parameter_counts_once),
        cmocka_unit_test(both_uses_of_a_tied_parameter_give_gradients),
        cmocka_unit_test(ties_may_be_chained),
        cmocka_unit_test(a_tie_may_name_a_relative_path),
        cmocka_unit_test(ties_that_cannot_be_are_refused),
        cmocka_unit_test(training_mode_reaches_everything_below),
        cmocka_unit_test(zero_grads_forgets_all_below),
        cmocka_unit_test(containers_run_their_children_in_order),
        cmocka_unit_test(a_container_s_forward_gets_inputs_and_user),
        cmocka_unit_test(forwards_refuse_what_they_cannot_take),
        cmocka_unit_test(patterns_match_whole_names),
        cmocka_unit_test(plans_give_layers_their_layouts),
        cmocka_unit_test(plans_may_start_below_the_root),
        cmocka_unit_test(plans_that_cannot_be_change_nothing),
        cmocka_unit_test(a_tied_parameter_takes_one_layout),
        cmocka_unit_test(values_are_kept_by_a_plan),
    };
    return cmocka_run_group_tests_name("unit/module", tests, NULL, NULL);
}
