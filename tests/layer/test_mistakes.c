/* Mistakes that a new user makes within a model, each with the sentence it gets: what is wrong, in
 * which module, with which sizes, and what to call. Those around it, of training loops, plans and
 * files, are in test_mistakes_train.c. */
#include "../../tshard.h"
#include "../../backends/tshard_threads.h"
#include "../support/ranks.h"

/* Where a mistake is made: "h.3.mlp" has layers c_fc (4 to 8, column-parallel), c_proj (8 to 4,
 * row-parallel), ln (8), wte (10 rows of 4) and qkv (4 to 24, three parts of two heads of 4). */
typedef struct place {
    tsh_ctx *ctx;
    tsh_module *mlp;
    tsh_tensor *x; /* (2, 3, 4), ones */
} place;

typedef struct mistake {
    void (*make)(place *p); /* what the forward of h.3.mlp does */
    int ranks;              /* on 1 up to so many; negative: on exactly so many */
    tsh_result code;
    const char *says; /* the whole sentence, or its beginning */
} mistake;

static tsh_tensor *call(place *p, const char *layer, tsh_tensor *x) {
    return tsh_forward(tsh_find(p->mlp, layer), x);
}

static tsh_tensor *ones3(place *p, int64_t a, int64_t b, int64_t c) {
    return tsh_ones(p->ctx, tsh_shape3(a, b, c));
}

static tsh_tensor *wide(place *p) {
    return call(p, "c_fc", p->x); /* (2, 3, 8) S(2) */
}

static tsh_tensor *partial(place *p) {
    return tsh_sum(wide(p), -1, 1); /* (2, 3, 1) P */
}

/* ---------------------------------------------------------------- shapes, values */

static void wrong_features(place *p) {
    (void)call(p, "c_proj", p->x);
}

static void product_of_what_does_not_fit(place *p) {
    (void)tsh_matmul(p->x, p->x);
}

static void sum_of_what_does_not_broadcast(place *p) {
    (void)tsh_add(p->x, tsh_ones(p->ctx, tsh_shape1(3)));
}

static void reshape_to_another_size(place *p) {
    (void)tsh_reshape(p->x, tsh_shape2(2, 10));
}

static void reshape_to_two_unknown_sizes(place *p) {
    (void)tsh_reshape(p->x, tsh_shape3(-1, 5, 1));
}

static void norm_of_other_features(place *p) {
    (void)call(p, "ln", p->x);
}

static void split_into_unequal_parts(place *p) {
    tsh_tensor *parts[3];
    (void)tsh_split(p->x, -1, 3, parts);
}

static void slice_beyond_the_end(place *p) {
    (void)tsh_slice(p->x, 1, 2, 2);
}

static void concat_of_other_sizes(place *p) {
    tsh_tensor *parts[2];
    parts[0] = p->x;
    parts[1] = ones3(p, 2, 3, 5);
    (void)tsh_concat(parts, 2, 1);
}

static void sum_over_no_dimension(place *p) {
    (void)tsh_sum(p->x, 3, 0);
}

static void heads_not_transposed(place *p) {
    tsh_tensor *q = tsh_reshape(p->x, tsh_shape4(2, 3, 2, 2)); /* (B, T, H, D) */
    tsh_tensor *k = tsh_transpose(q, 1, 2);                    /* (B, H, T, D) */
    (void)tsh_attention(q, k, k, NULL);
}

static void attention_without_heads(place *p) {
    (void)tsh_attention(p->x, p->x, p->x, NULL);
}

static void mask_of_another_shape(place *p) {
    tsh_tensor *q = tsh_ones(p->ctx, tsh_shape4(2, 2, 3, 4));
    const tsh_attention_desc desc = {.mask = tsh_ones(p->ctx, tsh_shape2(4, 4))};
    (void)tsh_attention(q, q, q, &desc);
}

static void token_out_of_range(place *p) {
    const int32_t ids[3] = {4, 10, 2};
    (void)call(p, "wte", tsh_tensor_from(p->ctx, TSH_I32, tsh_shape1(3), tsh_replicated(), ids));
}

static void sequence_longer_than_positions(place *p) {
    (void)call(p, "wte", tsh_arange(p->ctx, TSH_I32, 0, 12, 1));
}

static void tokens_as_floats(place *p) {
    (void)call(p, "wte", tsh_zeros(p->ctx, tsh_shape1(3)));
}

static void loss_of(place *p, int64_t target) {
    const int64_t targets[2] = {3, target};
    tsh_tensor *t = tsh_tensor_from(p->ctx, TSH_I64, tsh_shape1(2), tsh_replicated(), targets);
    (void)tsh_cross_entropy(tsh_ones(p->ctx, tsh_shape2(2, 8)), t, NULL);
}

static void class_out_of_range(place *p) {
    loss_of(p, 8);
}

static void class_ignored_by_another_value(place *p) {
    loss_of(p, -1);
}

static void targets_as_floats(place *p) {
    (void)tsh_cross_entropy(p->x, tsh_zeros(p->ctx, tsh_shape2(2, 3)), NULL);
}

static void logits_not_flattened(place *p) {
    (void)tsh_cross_entropy(p->x, tsh_arange(p->ctx, TSH_I64, 0, 6, 1), NULL);
}

static void probability_above_one(place *p) {
    (void)tsh_dropout(p->x, 2, p->mlp);
}

static void integers_in_a_product(place *p) {
    (void)tsh_matmul(p->x, tsh_cast(p->x, TSH_I32));
}

static void item_of_many_elements(place *p) {
    (void)tsh_item(p->ctx, p->x);
}

static void buffer_too_small(place *p) {
    float out[4];
    (void)tsh_read(p->ctx, p->x, TSH_GLOBAL, out, sizeof out);
}

/* -------------------------------------------------------------- NULL, names, trees */

static void null_argument(place *p) {
    (void)tsh_add(p->x, NULL);
}

static void forward_without_a_result(place *p) {
    p->x = tsh_relu(NULL); /* as after a `return` that was forgotten */
}

static void module_that_is_null(place *p) {
    (void)tsh_forward(tsh_child(p->mlp, 99), p->x);
}

static void two_inputs_for_one(place *p) {
    tsh_tensor *in[2];
    in[0] = in[1] = p->x;
    (void)tsh_forward_n(tsh_find(p->mlp, "c_fc"), in, 2);
}

static void tensor_of_another_ctx(place *p) {
    tsh_ctx *other = NULL;
    if (tsh_open(NULL, &other) == TSH_OK) (void)tsh_add(p->x, tsh_ones(other, tsh_shape1(4)));
    tsh_close(other);
}

static void mistyped_module(place *p) {
    (void)tsh_find(p->mlp, "c_porj");
}

static void mistyped_parameter(place *p) {
    (void)tsh_param(p->mlp, "c_fc.wieght");
}

static void mistyped_module_of_a_parameter(place *p) {
    (void)tsh_param(p->mlp, "c_fcc.weight");
}

static void two_modules_of_one_name(place *p) {
    const tsh_linear_desc desc = {.in = 4, .out = 4};
    (void)tsh_add_linear(p->mlp, "c_fc", &desc);
}

static void two_parameters_of_one_name(place *p) {
    (void)tsh_add_param(tsh_find(p->mlp, "c_fc"), "weight", tsh_shape1(4), NULL);
}

static void name_with_a_dot(place *p) {
    (void)tsh_add_dropout(p->mlp, "drop.1", 0.1);
}

static void tie_of_other_shapes(place *p) {
    (void)tsh_tie(tsh_find(p->mlp, "c_fc"), "weight", tsh_param(p->mlp, "wte.weight"));
}

/* ----------------------------------------------------------------------- layouts */

static void norm_of_sharded_features(place *p) {
    (void)call(p, "ln", wide(p));
}

static void gelu_of_a_partial_sum(place *p) {
    (void)tsh_gelu(partial(p));
}

static void bias_on_every_rank(place *p) {
    (void)tsh_add(partial(p), tsh_ones(p->ctx, tsh_shape1(1)));
}

static void sharded_plus_replicated(place *p) {
    (void)tsh_add(wide(p), tsh_ones(p->ctx, tsh_shape1(8)));
}

static void softmax_over_sharded_features(place *p) {
    (void)tsh_softmax(wide(p), -1);
}

static void loss_of_partial_logits(place *p) {
    tsh_tensor *t = tsh_cast(tsh_zeros(p->ctx, tsh_shape2(2, 3)), TSH_I64);
    (void)tsh_cross_entropy(partial(p), t, NULL);
}

static void fused_sliced(place *p) {
    tsh_tensor *parts[3];
    (void)tsh_split(call(p, "qkv", p->x), -1, 3, parts);
}

static void fused_sliced_elsewhere(place *p) {
    (void)tsh_slice(call(p, "qkv", p->x), -1, 2, 7);
}

static void fused_reshaped(place *p) {
    tsh_shape five = tsh_shape3(2, 3, 3);
    five.ndim = 5;
    five.dim[3] = 2;
    five.dim[4] = 4;
    (void)tsh_reshape(call(p, "qkv", p->x), five);
}

static void fused_reshaped_to_parts(place *p) {
    (void)tsh_reshape(call(p, "qkv", p->x), tsh_shape4(2, 3, 3, 8));
}

static void heads_without_a_unit(place *p) {
    (void)tsh_reshape(wide(p), tsh_shape4(2, 3, 2, 4));
}

static void tokens_flattened_over_sharded_features(place *p) {
    (void)tsh_reshape(wide(p), tsh_shape2(2, 24));
}

#define MLP "h.3.mlp: "

static const mistake mistakes[] = {
    {wrong_features, 4, TSH_ERR_SHAPE,
     "h.3.mlp.c_proj: tsh_linear: input has 4 features, weight \"h.3.mlp.c_proj.weight\" takes 8"},
    {product_of_what_does_not_fit, 4, TSH_ERR_SHAPE,
     MLP "tsh_matmul: (2, 3, 4) R times (2, 3, 4) R does not fit; takes (.., m, k) times "
         "(.., k, n) with leading sizes that broadcast: tsh_transpose, tsh_reshape"},
    {sum_of_what_does_not_broadcast, 4, TSH_ERR_SHAPE,
     MLP "tsh_add: shapes (2, 3, 4) R and (3) R do not broadcast (4 against 3); counted from the "
         "last one, sizes must be equal or 1: tsh_reshape"},
    {reshape_to_another_size, 4, TSH_ERR_SHAPE,
     MLP "tsh_reshape: (2, 3, 4) R has 24 elements, which do not fit the new shape (2, 10)"},
    {reshape_to_two_unknown_sizes, 1, TSH_ERR_SHAPE, "which do not fit the new shape (-1, 5, 1)"},
    {norm_of_other_features, 4, TSH_ERR_SHAPE,
     "h.3.mlp.ln: tsh_layer_norm: input (2, 3, 4) R, weight (8) R; weight and bias must have as "
     "many elements as the input has features (its last dimension)"},
    {split_into_unequal_parts, 1, TSH_ERR_SHAPE,
     MLP "tsh_split: a dimension of 4 has no 3 equal parts"},
    {slice_beyond_the_end, 1, TSH_ERR_SHAPE,
     MLP "tsh_slice: 2 elements from 2 of dimension 1 are outside (2, 3, 4) R"},
    {concat_of_other_sizes, 1, TSH_ERR_SHAPE,
     MLP "tsh_concat: part 1, f32 (2, 3, 5) R, does not go with f32 (2, 3, 4) R along dimension 1"},
    {sum_over_no_dimension, 1, TSH_ERR_SHAPE,
     MLP "tsh_sum: there is no dimension 3 in (2, 3, 4) R"},
    {heads_not_transposed, 1, TSH_ERR_SHAPE,
     MLP "tsh_attention: q (2, 3, 2, 2) R has 3 heads, no multiple of the 2 of k (2, 2, 3, 2) R"},
    {attention_without_heads, 1, TSH_ERR_SHAPE,
     MLP "tsh_attention: q (2, 3, 4) R, k (2, 3, 4) R, v (2, 3, 4) R; takes (B, H, Tq, D) and "
         "twice (B, Hkv, Tk, D)"},
    {mask_of_another_shape, 4, TSH_ERR_SHAPE,
     MLP "tsh_attention: mask f32 (4, 4) R; takes one of f32 or i32 that broadcasts to "
         "(2, 2, 3, 3), replicated or sharded as the heads of q"},
    {token_out_of_range, 4, TSH_ERR_ARGUMENT,
     "h.3.mlp.wte: tsh_embedding: id 10 at position 1 is outside [0, 10), the rows of the weight"},
    {sequence_longer_than_positions, 1, TSH_ERR_ARGUMENT,
     "h.3.mlp.wte: tsh_embedding: id 10 at position 10 is outside [0, 10), the rows of the weight"},
    {tokens_as_floats, 1, TSH_ERR_DTYPE,
     "h.3.mlp.wte: tsh_embedding: ids f32 (3) R, weight (10, 4) R; takes ids of i32 or i64, as "
     "tsh_cast(ids, TSH_I64) gives, and a weight (V, D)"},
    {class_out_of_range, 4, TSH_ERR_ARGUMENT,
     MLP "tsh_cross_entropy: target 8 at row 1 is outside [0, 8)"},
    {class_ignored_by_another_value, 4, TSH_ERR_ARGUMENT,
     MLP "tsh_cross_entropy: target -1 at row 1 is outside [0, 8); to leave such rows out: "
         ".ignore = 1, .ignore_index = -1"},
    {targets_as_floats, 1, TSH_ERR_SHAPE,
     MLP "tsh_cross_entropy: logits (2, 3, 4) R and target f32 (2, 3) R; takes (.., V) and "
         "integers (..), or probabilities (.., V)"},
    {logits_not_flattened, 1, TSH_ERR_SHAPE,
     MLP "tsh_cross_entropy: logits (2, 3, 4) R and target i64 (6) R; takes (.., V) and integers"},
    {probability_above_one, 1, TSH_ERR_ARGUMENT, MLP "tsh_dropout: p is 2, not within [0, 1]"},
    {integers_in_a_product, 1, TSH_ERR_DTYPE, MLP "tsh_matmul: b is i32, not f32"},
    {item_of_many_elements, 1, TSH_ERR_SHAPE,
     MLP "tsh_item: takes one replicated element, not (2, 3, 4) R"},
    {buffer_too_small, 1, TSH_ERR_ARGUMENT,
     MLP "tsh_read: 16 bytes were given, the tensor's global shape holds 96"},

    {null_argument, 4, TSH_ERR_ARGUMENT, MLP "tsh_add: b is NULL"},
    {forward_without_a_result, 4, TSH_ERR_ARGUMENT,
     MLP "tsh_forward: the module's forward returned NULL"},
    {module_that_is_null, 1, TSH_ERR_ARGUMENT, MLP "tsh_forward: the module is NULL"},
    {two_inputs_for_one, 1, TSH_ERR_ARGUMENT,
     "h.3.mlp.c_fc: tsh_forward: takes one input, not 2"},
    {tensor_of_another_ctx, 1, TSH_ERR_ARGUMENT,
     MLP "tsh_add: b belongs to another ctx; tsh_read and tsh_tensor_from copy values"},
    {mistyped_module, 4, TSH_ERR_ARGUMENT,
     MLP "tsh_find: \"h.3.mlp\" has no module \"c_porj\"; near it are \"c_proj\","},
    {mistyped_parameter, 4, TSH_ERR_ARGUMENT,
     MLP "tsh_param: \"h.3.mlp\" has no parameter \"c_fc.wieght\"; there are \"weight\", \"bias\""},
    {mistyped_module_of_a_parameter, 1, TSH_ERR_ARGUMENT,
     MLP "tsh_param: \"h.3.mlp\" has no parameter \"c_fcc.weight\"; near it are \"c_fc\","},
    {two_modules_of_one_name, 4, TSH_ERR_ARGUMENT,
     MLP "tsh_add_linear: \"h.3.mlp\" has a child \"c_fc\" already"},
    {two_parameters_of_one_name, 1, TSH_ERR_ARGUMENT,
     MLP "tsh_add_param: \"h.3.mlp.c_fc\" has a parameter \"weight\" already"},
    {name_with_a_dot, 1, TSH_ERR_ARGUMENT,
     MLP "tsh_add_dropout: \"drop.1\" under \"h.3.mlp\" is no name: it may not be empty, hold a "
         "dot, or make a path of 192 characters"},
    {tie_of_other_shapes, 1, TSH_ERR_SHAPE,
     MLP "tsh_tie: \"h.3.mlp.c_fc.weight\" is (8, 4) S(0), \"h.3.mlp.wte.weight\" is (10, 4) R"},

    {norm_of_sharded_features, 1, TSH_ERR_LAYOUT,
     "h.3.mlp.ln: tsh_layer_norm: input is sharded along its last dimension (rank 0 holds 8 of 8 "
     "features), and weight or bias not like it; gather it first: tsh_redistribute(x, "
     "tsh_replicated()), or shard them by the same units"},
    {norm_of_sharded_features, 4, TSH_ERR_LAYOUT,
     "of 8 features), and weight or bias not like it; gather it first: tsh_redistribute(x, "
     "tsh_replicated()), or shard them by the same units"},
    {gelu_of_a_partial_sum, -2, TSH_ERR_LAYOUT,
     MLP "tsh_gelu: input is a partial sum, and the op is not linear; x is (2, 3, 1) P on 2 "
         "ranks; complete it first: tsh_redistribute(x, tsh_replicated())"},
    {bias_on_every_rank, 4, TSH_ERR_LAYOUT,
     MLP "tsh_add: layouts of (2, 3, 1) P and (1) R do not go together; complete the partial sum "
         "first: tsh_redistribute(x, tsh_replicated())"},
    {sharded_plus_replicated, 4, TSH_ERR_LAYOUT,
     MLP "tsh_add: layouts of (2, 3, 8) S(2) and (8) R do not go together; make them alike: "
         "tsh_redistribute(b, tsh_layout_of(a)), or gather: tsh_redistribute(a, "
         "tsh_replicated())"},
    {softmax_over_sharded_features, -3, TSH_ERR_LAYOUT,
     MLP "tsh_softmax: input is not whole along the dimension, and the op needs all values there; "
         "x is (2, 3, 8) S(2) on 3 ranks; complete it first: tsh_redistribute(x, "
         "tsh_replicated())"},
    {loss_of_partial_logits, -4, TSH_ERR_LAYOUT,
     MLP "tsh_cross_entropy: the logits (2, 3, 1) P are a partial sum over 4 ranks; complete them "
         "first: tsh_redistribute(logits, tsh_replicated())"},
    {fused_sliced, 4, TSH_ERR_LAYOUT,
     MLP "tsh_slice: [0, 8) does not begin and end at segment boundaries of the sharded dimension "
         "of (2, 3, 24) S(2, unit 4); if these are 3 fused parts, as [Q|K|V], give the rule of "
         "their linear .segments = 3 in the plan (and .unit = head size); else gather it first: "
         "tsh_redistribute(x, tsh_replicated())"},
    {fused_sliced_elsewhere, 4, TSH_ERR_LAYOUT, "S(2, unit 4); gather it first"},
    {fused_reshaped, 4, TSH_ERR_LAYOUT,
     MLP "tsh_reshape: from (2, 3, 24) S(2, unit 4) to (2, 3, 3, 2, 4) would cut across the "
         "sharded dimension or its units of 4; if these are 3 fused parts, as [Q|K|V], give the "
         "rule of their linear .segments = 3 in the plan (and .unit = head size); else gather it "
         "first: tsh_redistribute(x, tsh_replicated())"},
    {fused_reshaped_to_parts, 4, TSH_ERR_LAYOUT, "if these are 3 fused parts, as [Q|K|V], give"},
    {heads_without_a_unit, 4, TSH_ERR_LAYOUT,
     MLP "tsh_reshape: from (2, 3, 8) S(2) to (2, 3, 2, 4) would cut across the sharded dimension "
         "or its units of 1; if these are 2 heads, give the rule of their linear .unit = 4 in the "
         "plan; else gather it first: tsh_redistribute(x, tsh_replicated())"},
    {tokens_flattened_over_sharded_features, 4, TSH_ERR_LAYOUT,
     "to (2, 24) would cut across the sharded dimension or its units of 1; gather it first"},
};

/* --------------------------------------------------------------------- running them */

static tsh_tensor *forward(tsh_module *mlp, tsh_tensor **in, int n, void *user) {
    const mistake *const *m = (const mistake *const *)user;
    place p = {NULL, mlp, in[0]};
    (void)n;
    p.ctx = tsh_ctx_of(in[0]);
    (*m)->make(&p);
    return p.x;
}

static int make(tsh_ctx *ctx, void *user) {
    const mistake *m = *(const mistake *const *)user;
    const tsh_module_desc desc = {forward, user};
    const tsh_linear_desc c_fc = {.in = 4, .out = 8, .style = TSH_COLWISE};
    const tsh_linear_desc c_proj = {.in = 8, .out = 4, .style = TSH_ROWWISE};
    const tsh_linear_desc qkv = {.in = 4, .out = 24, .style = TSH_COLWISE, .unit = 4};
    const tsh_layer_norm_desc ln = {.dim = 8};
    const tsh_embedding_desc wte = {.count = 10, .dim = 4};
    tsh_module *h = tsh_add_module(tsh_root(ctx), "h", NULL), *mlp;
    mlp = tsh_add_module(tsh_add_module(h, "3", NULL), "mlp", &desc);
    tsh_add_linear(mlp, "c_fc", &c_fc);
    tsh_add_linear(mlp, "c_proj", &c_proj);
    tsh_add_linear(mlp, "qkv", &qkv);
    tsh_add_layer_norm(mlp, "ln", &ln);
    tsh_add_embedding(mlp, "wte", &wte);
    CHECK_OK();
    (void)tsh_forward(mlp, tsh_ones(ctx, tsh_shape3(2, 3, 4)));
    CHECK_SAYS(m->code, m->says);
    (void)tsh_barrier(tsh_world(ctx)); /* an error, forgotten, has not reached the other ranks */
    CHECK_OK();
    return 0;
}

static void every_mistake_gets_its_sentence(void **state) {
    int i, ranks;
    (void)state;
    for (i = 0; i < COUNT(mistakes); i++) {
        const mistake *m = &mistakes[i];
        for (ranks = m->ranks < 0 ? -m->ranks : 1; ranks <= abs(m->ranks); ranks++)
            ranks_run(ranks, make, &m);
    }
}

/* Segments and units as the plan should have them: no error. */
static int as_it_should_be(tsh_ctx *ctx, void *user) {
    const tsh_linear_desc desc = {.in = 4, .out = 24, .style = TSH_COLWISE, .segments = 3,
                                  .unit = 4};
    tsh_module *qkv = tsh_add_linear(tsh_root(ctx), "qkv", &desc);
    tsh_tensor *y = tsh_forward(qkv, tsh_ones(ctx, tsh_shape3(2, 3, 4))), *parts[3];
    tsh_shape five = tsh_shape3(2, 3, 3);
    (void)user;
    five.ndim = 5;
    five.dim[3] = 2;
    five.dim[4] = 4;
    CHECK(tsh_split(y, -1, 3, parts) == TSH_OK, "three parts");
    CHECK(tsh_reshape(parts[2], tsh_shape4(2, 3, 2, 4)), "heads");
    CHECK(tsh_reshape(y, five), "at once");
    return 0;
}

static void a_fused_layer_with_segments_is_cut_by_heads(void **state) {
    int ranks;
    (void)state;
    for (ranks = 1; ranks <= 4; ranks++) ranks_run(ranks, as_it_should_be, NULL);
}

int main(void) {
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_mistake_gets_its_sentence),
        cmocka_unit_test(a_fused_layer_with_segments_is_cut_by_heads),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
