/* Policies: every shipped family, sharded by its policy, equals the dense model; layouts checked by
 * hand; policies of one's own, with parts fused and stored reversed in one list; refusals. */
/* build: double */
#include "../../tshard.h"
#include "../../backends/tshard_threads.h"
#include "../support/ranks.h"
#include "../support/families.h"

/* Exponentials, and sums in another order than one rank's, relative to a tensor's largest value;
 * through two blocks with norms. */
#define ROUNDING (sizeof(tsh_real) == sizeof(double) ? 1e-11 : 1e-4)

/* ------------------------------------------------------------ every family */

typedef struct family_trial {
    const family *f;
    int dense, late; /* late: the model holds values when it is sharded */
    family_record *want;
} family_trial;

/* All-reduces of a step: forward one per row-parallel layer; backward one per tensor that
 * column-parallel layers take, and where K and V stay whole one for each of their values. */
static int family_counts(tsh_ctx *ctx, const family *f, int forward, int backward) {
    const int p = tsh_tp(ctx)->size, towers = f->tower[1] ? 2 : 1;
    const int two = f->marks2 & FAMILY_DECODER, one = f->marks & FAMILY_DECODER;
    const int whole = f->kv && f->kv < f->heads && f->kv < p;
    int sums = f->order == FAMILY_ONE_NORM ? 1 : 2, rows = 2 * 2 * towers + (two || one ? 2 : 0);
    if (p == 1) return 0;
    CHECK(forward == rows, "%s, %s: %d all-reduces forward, not %d", f->policy, f->note, forward,
          rows);
    sums = 2 * towers * sums + (two || one ? 3 : 0) + (whole ? 4 : 0);
    /* inputs that are leaves are completed together */
    if (f->order == FAMILY_POST && (one || (towers == 2))) sums--;
    CHECK(backward == sums, "%s, %s: %d all-reduces backward, not %d", f->policy, f->note, backward,
          sums);
    return 0;
}

static int family_rank(tsh_ctx *ctx, void *user) {
    const family_trial *t = (const family_trial *)user;
    family_record got;
    int forward = 0, backward = 0, failed;
    family_build(ctx, t->f);
    if (t->late) tsh_materialize(tsh_root(ctx));
    if (!t->dense) tsh_parallelize_policy(tsh_root(ctx), tsh_policy_find(t->f->policy));
    CHECK_OK();
    if (family_step(ctx, t->f, &got, &forward, &backward)) return 1;
    if (t->dense) {
        *t->want = got;
        return 0;
    }
    failed = family_compare(ctx, t->f, t->want, &got, ROUNDING) ||
             family_counts(ctx, t->f, forward, backward);
    family_free(&got);
    return failed;
}

static void every_family_equals_the_dense_model(void **state) {
    static family_record want;
    int i, d;
    (void)state;
    for (i = 0; i < COUNT(families); i++) {
        family_trial t = {&families[i], 1, i % 2, &want};
        ranks_run(1, family_rank, &t);
        t.dense = 0;
        for (d = 0; d < COUNT(ranks_degrees); d++) ranks_run(ranks_degrees[d], family_rank, &t);
        family_free(&want);
    }
}

static void every_shipped_policy_is_among_them(void **state) {
    static const char *const names[] = {"gpt2",   "gpt_neo", "gptj",    "gpt_neox",    "opt",
                                        "bloom",  "llama",   "mistral", "qwen2",       "phi",
                                        "bert",   "vit",     "roberta", "distil_bert", "electra",
                                        "albert", "bart",    "t5",      "clip",        "deit"};
    int i, j, tried;
    (void)state;
    for (i = 0; i < COUNT(names); i++) {
        const tsh_policy *policy = tsh_policy_find(names[i]);
        if (!policy || strcmp(policy->name, names[i]) != 0) fail_msg("%s", names[i]);
        for (tried = j = 0; j < COUNT(families); j++)
            tried += strcmp(families[j].policy, names[i]) == 0;
        if (!tried) fail_msg("%s is not tried", names[i]);
    }
    assert_null(tsh_policy_find("gpt"));
    assert_null(tsh_policy_find(NULL));
}

/* ---------------------------------------------------------- layouts by hand */

/* Which ranges of dimension `dim` of a parameter each rank holds: "0+8 12+8|8+4 20+4" for two
 * ranks; dim -1: replicated. */
typedef struct hand {
    const char *policy, *note, *param;
    int dim;
    const char *ranges;
} hand;

/* Heads and sizes as in the table of families; names without the list of blocks. */
static const hand by_hand[] = {
    /* 3 heads of 4 on 2 ranks: 2 and 1; Conv1D cuts columns, each of q, k, v for itself */
    {"gpt2", "", "attn.c_attn.weight", 1, "0+8 12+8 24+8|8+4 20+4 32+4"},
    {"gpt2", "", "attn.c_attn.bias", 0, "0+8 12+8 24+8|8+4 20+4 32+4"},
    {"gpt2", "", "attn.c_proj.weight", 0, "0+8|8+4"},
    {"gpt2", "", "attn.c_proj.bias", -1, ""},
    {"gpt2", "", "mlp.c_fc.weight", 1, "0+5|5+5"},
    {"gpt2", "", "mlp.c_proj.weight", 0, "0+5|5+5"},
    {"gpt2", "", "ln_1.weight", -1, ""},
    {"gpt2", "", "attn.c_attn.weight", 1,
     "0+4 12+4 24+4|4+4 16+4 28+4|8+4 20+4 32+4|12+0 24+0 36+0"},
    /* a list that mixes 3 parts, 2 parts and 1: nothing leaks from one entry to the next */
    {"gpt2", "cross", "attn.c_attn.weight", 1, "0+8 12+8 24+8|8+4 20+4 32+4"},
    {"gpt2", "cross", "crossattention.c_attn.weight", 1, "0+8 12+8|8+4 20+4"},
    {"gpt2", "cross", "crossattention.c_attn.bias", 0, "0+8 12+8|8+4 20+4"},
    {"gpt2", "cross", "crossattention.q_attn.weight", 1, "0+8|8+4"},
    {"gpt2", "cross", "crossattention.c_proj.weight", 0, "0+8|8+4"},
    {"gpt2", "cross", "crossattention.c_proj.bias", -1, ""},
    /* heads of q, k and v together: 12 rows each */
    {"gpt_neox", "", "attention.query_key_value.weight", 0, "0+24|24+12"},
    {"gpt_neox", "", "attention.query_key_value.weight", 0, "0+12|12+12|24+12|36+0"},
    {"bloom", "", "self_attention.query_key_value.bias", 0, "0+18|18+12"},
    {"bloom", "", "self_attention.dense.weight", 1, "0+6|6+4"},
    /* 6 heads in 3 groups: a group is not cut */
    {"llama", "3 groups of 2", "self_attn.q_proj.weight", 0, "0+8|8+4"},
    {"llama", "3 groups of 2", "self_attn.k_proj.weight", 0, "0+4|4+2"},
    {"llama", "3 groups of 2", "self_attn.v_proj.weight", 0, "0+2|2+2|4+2"},
    {"llama", "3 groups of 2", "self_attn.o_proj.weight", 1, "0+8|8+4"},
    /* ... unless there are more ranks than groups: then K and V are whole */
    {"llama", "3 groups of 2", "self_attn.q_proj.weight", 0, "0+4|4+4|8+4|12+0"},
    {"llama", "3 groups of 2", "self_attn.k_proj.weight", -1, "|||"},
    {"mistral", "fewer kv heads than ranks", "self_attn.q_proj.weight", 0, "0+4|4+4|8+4"},
    {"mistral", "fewer kv heads than ranks", "self_attn.v_proj.weight", -1, "||"},
    {"mistral", "fewer kv heads than ranks", "self_attn.v_proj.weight", 0, "0+2|2+2"},
    {"qwen2", "one kv head", "self_attn.q_proj.bias", 0, "0+8|8+4"},
    {"qwen2", "one kv head", "self_attn.k_proj.bias", -1, ""},
    {"opt", "", "fc1.weight", 0, "0+2|2+2|4+1|5+0"}, /* 5 rows on 4 ranks */
    {"opt", "", "fc2.weight", 1, "0+2|2+2|4+1|5+0"},
    {"opt", "", "fc2.bias", -1, "|||"},
    {"t5", "", "layer.0.SelfAttention.o.weight", 1, "0+8|8+4"},
};

static int hand_rank(tsh_ctx *ctx, void *user) {
    const hand *h = (const hand *)user;
    const char *at = h->ranges;
    const family *f = families;
    char path[FAMILY_PATH];
    tsh_layout layout;
    tsh_range range[TSH_MAX_SEGMENTS];
    int r, s, used;
    long start, length;
    while (strcmp(f->policy, h->policy) != 0 || strcmp(f->note, h->note) != 0) f++;
    family_build(ctx, f);
    CHECK(tsh_parallelize_policy(tsh_root(ctx), tsh_policy_find(h->policy)) == TSH_OK, "policy");
    (void)snprintf(path, sizeof path, "%s.1.%s", f->tower[0], h->param);
    layout = tsh_layout_of(tsh_param(tsh_root(ctx), path));
    if (h->dim < 0) {
        CHECK(layout.kind == TSH_REPLICATED, "%s", path);
        return 0;
    }
    CHECK(layout.kind == TSH_SHARDED && layout.dim == h->dim, "%s: dimension %d", path, layout.dim);
    for (r = 0; r < tsh_tp(ctx)->size; r++, at += *at == '|') {
        (void)tsh_shard_range(layout, tsh_size(tsh_param(tsh_root(ctx), path), h->dim),
                              tsh_tp(ctx)->size, r, range);
        for (s = 0; *at && *at != '|'; s++, at += *at == ' ') {
            int read = sscanf(at, "%ld+%ld%n", &start, &length, &used);
            CHECK(read == 2, "%s", at);
            at += used;
            CHECK(s < layout.segments, "%s: rank %d has %d segments", path, r, s);
            CHECK(range[s].start == start && range[s].length == length,
                  "%s: rank %d has %ld+%ld, not %ld+%ld", path, r, (long)range[s].start,
                  (long)range[s].length, start, length);
        }
        CHECK(s == layout.segments, "%s: %d segments, not %d", path, layout.segments, s);
    }
    CHECK(!*at, "%s: all ranks are told", path);
    return 0;
}

static void ranks_hold_what_one_counts_by_hand(void **state) {
    int i;
    const char *c;
    (void)state;
    for (i = 0; i < COUNT(by_hand); i++) {
        hand h = by_hand[i];
        int ranks = h.ranges[0] ? 1 : 2;
        for (c = h.ranges; *c; c++) ranks += *c == '|';
        if (h.ranges[0] == '|') ranks = (int)strlen(h.ranges) + 1;
        ranks_run(ranks, hand_rank, &h);
    }
}

/* ----------------------------------------------------- a policy of one's own
 * As XLNet: q and [k|v] are stored (in, out), r, o and a bias alone are not; n_head heads of
 * d_model features in all; the list attn_out names a layer that the block does not have. */

static const tsh_policy_heads xlnet_heads = {
    .heads = "rel_attn.n_head", .kv_heads = NULL, .hidden = "rel_attn.d_model"};
static const tsh_policy_layer xlnet_qkv[] = {
    {.weight = "rel_attn.q.weight", .reversed = 1, .heads = &xlnet_heads},
    {.weight = "rel_attn.kv.weight", .n_fused = 2, .reversed = 1, .heads = &xlnet_heads, .kv = 1},
    {.weight = "rel_attn.r.weight", .heads = &xlnet_heads},
    {.bias = "rel_attn.b.bias", .heads = &xlnet_heads},
    {0}};
static const tsh_policy_layer xlnet_out[] = {
    {.weight = "rel_attn.seg_embed.weight", .ignore_checker = 1, .heads = &xlnet_heads},
    {.weight = "rel_attn.o.weight", .heads = &xlnet_heads},
    {0}};
static const tsh_policy_layer xlnet_in[] = {
    {.weight = "ff.layer_1.weight", .bias = "ff.layer_1.bias"}, {0}};
static const tsh_policy_layer xlnet_down[] = {
    {.weight = "ff.layer_2.weight", .bias = "ff.layer_2.bias", .replace = TSH_AUTO}, {0}};
static const char *const xlnet_arguments[] = {"ff.d_inner", "label", NULL};
static const tsh_policy xlnet = {.name = "xlnet",
                                 .blocks = "transformer.layer.?",
                                 .attn_qkv = xlnet_qkv,
                                 .attn_out = xlnet_out,
                                 .mlp_in = xlnet_in,
                                 .mlp_out = xlnet_down,
                                 .arguments = xlnet_arguments};

static void xlnet_linear(tsh_module *parent, const char *name, int64_t in, int64_t out,
                         int reversed, int bias) {
    const tsh_linear_desc desc = {
        .in = in, .out = out, .reversed = reversed, .bias = bias ? TSH_YES : TSH_NO};
    tsh_add_linear(parent, name, &desc);
}

/* 3 heads of 2; 7 inner features. */
static tsh_module *xlnet_block(tsh_ctx *ctx) {
    tsh_module *block = family_way(tsh_root(ctx), "transformer.layer.0", NULL),
               *rel = family_child(block, "rel_attn"), *ff = family_child(block, "ff");
    tsh_set_argument(block, "label", 4);
    tsh_set_argument(rel, "n_head", 3);
    tsh_set_argument(rel, "d_model", 6);
    tsh_set_argument(ff, "d_inner", 7);
    xlnet_linear(rel, "q", 6, 6, 1, 0);
    xlnet_linear(rel, "kv", 6, 12, 1, 0);
    xlnet_linear(rel, "r", 6, 6, 0, 0);
    xlnet_linear(rel, "b", 6, 6, 0, 1);
    xlnet_linear(rel, "o", 6, 6, 0, 0);
    xlnet_linear(rel, "unnamed", 6, 6, 0, 1);
    xlnet_linear(ff, "layer_1", 6, 7, 0, 1);
    xlnet_linear(ff, "layer_2", 7, 6, 0, 1);
    return block;
}

/* (q x) * (k x) + v x + (r x) + (b x), which keeps the cut by heads, through o, and the MLP. */
static tsh_tensor *xlnet_forward(tsh_module *block, tsh_tensor *x) {
    tsh_module *rel = tsh_find(block, "rel_attn"), *ff = tsh_find(block, "ff");
    tsh_tensor *kv = family_call(rel, "kv", x), *y;
    y = tsh_mul(family_call(rel, "q", x), tsh_slice(kv, -1, 0, 6));
    y = tsh_add(tsh_add(y, tsh_slice(kv, -1, 6, 6)), family_call(rel, "r", x));
    y = tsh_add(y, family_call(rel, "b", x));
    y = tsh_add(family_call(rel, "o", y), family_call(rel, "unnamed", x));
    return family_call(ff, "layer_2", tsh_relu(family_call(ff, "layer_1", y)));
}

static int xlnet_layouts(tsh_ctx *ctx, tsh_module *block) {
    static const struct {
        const char *path, *layout;
    } want[] = {
        {"rel_attn.q.weight", "S(1, unit 2)"}, {"rel_attn.kv.weight", "S(1, 2 segments, unit 2)"},
        {"rel_attn.r.weight", "S(0, unit 2)"}, {"rel_attn.b.weight", "S(0, unit 2)"},
        {"rel_attn.b.bias", "S(0, unit 2)"},   {"rel_attn.o.weight", "S(1, unit 2)"},
        {"rel_attn.unnamed.weight", "R"},      {"ff.layer_1.weight", "S(0)"},
        {"ff.layer_2.weight", "S(1)"},         {"ff.layer_2.bias", "R"}};
    char text[64];
    int i;
    for (i = 0; i < COUNT(want); i++) {
        tsh_layout layout = tsh_layout_of(tsh_param(block, want[i].path));
        CHECK(strcmp(tsh_layout_text(layout, text, sizeof text), want[i].layout) == 0,
              "%s is %s, not %s", want[i].path, text, want[i].layout);
    }
    return 0;
}

/* The shares of ranks 0, 1 and 2 of 2 and of 3. */
static int xlnet_shares(tsh_ctx *ctx, tsh_module *block) {
    static const int64_t heads[2][3] = {{2, 1, 0}, {1, 1, 1}}, inner[2][3] = {{4, 3, 0}, {3, 3, 1}};
    const int p = tsh_tp(ctx)->size, r = tsh_tp(ctx)->rank;
    tsh_module *rel = tsh_find(block, "rel_attn"), *ff = tsh_find(block, "ff");
    CHECK(tsh_argument(rel, "n_head") == 3 && tsh_argument(rel, "d_model") == 6, "global values");
    if (p != 2 && p != 3) return 0;
    CHECK(tsh_local_argument(rel, "n_head") == heads[p - 2][r], "heads");
    CHECK(tsh_local_argument(rel, "d_model") == 2 * heads[p - 2][r], "hidden size");
    CHECK(tsh_local_argument(ff, "d_inner") == inner[p - 2][r], "inner size");
    return 0;
}

static int xlnet_same(tsh_ctx *ctx, int dense, capture *got) {
    tsh_module *block = xlnet_block(ctx);
    tsh_tensor *x = same_leaf(ctx, dense, "2,3,6 R", 1, 5), *y;
    static const char *const watched[] = {"rel_attn.q.weight", "rel_attn.kv.weight",
                                          "rel_attn.r.weight", "rel_attn.o.weight",
                                          "rel_attn.b.bias"};
    int i;
    if (!dense) CHECK(tsh_parallelize_policy(tsh_root(ctx), &xlnet) == TSH_OK, "policy");
    tsh_each_param(tsh_root(ctx), family_fill, ctx);
    y = xlnet_forward(block, x);
    CHECK(!capture_add(ctx, got, y), "output");
    CHECK(tsh_backward(ctx, ranks_loss(ctx, y)) == TSH_OK, "backward");
    CHECK(!capture_add(ctx, got, tsh_grad(x)), "input");
    for (i = 0; i < COUNT(watched); i++)
        CHECK(!capture_add(ctx, got, tsh_grad(tsh_param(block, watched[i]))), "%s", watched[i]);
    return dense ? 0 : xlnet_layouts(ctx, block) || xlnet_shares(ctx, block);
}

static void lists_may_mix_fused_and_reversed_layers(void **state) {
    (void)state;
    same_prove(xlnet_same, ROUNDING);
}

/* Query and key and value heads in one weight: segments of their own lengths. */
static int fused_groups(tsh_ctx *ctx, void *user) {
    static const tsh_policy_heads heads = {.heads = "heads", .kv_heads = "kv"};
    static const tsh_policy_layer qkv[] = {
        {.weight = "qkv.weight", .bias = "qkv.bias", .n_fused = 3, .heads = &heads}, {0}};
    static const tsh_policy policy = {.name = "fused", .blocks = "b", .attn_qkv = qkv};
    static const int64_t want[2][3][2] = {{{0, 12}, {12, 6}, {18, 6}}, /* 2 groups of 3 heads */
                                          {{0, 6}, {12, 3}, {18, 3}}}; /* one each on 2 ranks */
    const int p = tsh_tp(ctx)->size, r = tsh_tp(ctx)->rank;
    tsh_module *b = family_child(tsh_root(ctx), "b");
    tsh_range range[TSH_MAX_SEGMENTS];
    tsh_layout layout;
    int s;
    (void)user;
    xlnet_linear(b, "qkv", 4, 24, 0, 1);
    tsh_set_argument(b, "heads", 4);
    tsh_set_argument(b, "kv", 2);
    if (p > 2) {
        CHECK(tsh_parallelize_policy(tsh_root(ctx), &policy) == TSH_ERR_LAYOUT, "too few");
        CHECK(strstr(tsh_last_error(ctx)->message,
                     "fused: block \"b\" fuses 4 query heads with 2 key and value heads in "
                     "\"qkv.weight\", but there are 3 ranks: make it three layers"),
              "sentence");
        tsh_clear_error(ctx);
        return 0;
    }
    CHECK(tsh_parallelize_policy(tsh_root(ctx), &policy) == TSH_OK, "policy");
    layout = tsh_layout_of(tsh_param(b, "qkv.weight"));
    CHECK(layout.segments == 3, "segments");
    (void)tsh_shard_range(layout, 24, p, r, range);
    for (s = 0; s < 3; s++) {
        CHECK(range[s].length == want[p - 1][s][1], "segment %d: %ld", s, (long)range[s].length);
        CHECK(range[s].start == want[p - 1][s][0] + r * range[s].length, "segment %d", s);
    }
    CHECK(tsh_local_argument(b, "heads") == 4 / p && tsh_local_argument(b, "kv") == 2 / p,
          "shares");
    return 0;
}

/* A plan's rule says the same without head counts. */
static int unequal_parts(tsh_ctx *ctx, void *user) {
    static const tsh_segment parts[] = {{16, 8}, {4, 2}, {4, 2}}, short_of[] = {{16, 8}, {4, 2}};
    tsh_plan_rule rule = {.path = "qkv", .style = TSH_COLWISE, .segments = 3, .cut = parts};
    const tsh_layout want = {TSH_SHARDED, 0, 3, {{16, 8}, {4, 2}, {4, 2}}};
    const int64_t own = tsh_shard_range(want, 24, tsh_tp(ctx)->size, tsh_tp(ctx)->rank, NULL);
    tsh_tensor *bias;
    (void)user;
    xlnet_linear(tsh_root(ctx), "qkv", 4, 24, 0, 1);
    bias = tsh_param(tsh_root(ctx), "qkv.bias");
    CHECK(tsh_parallelize(tsh_root(ctx), &rule, 1) == TSH_OK, "plan");
    CHECK(own == 12 && tsh_local_size(bias, 0) == own, "%ld of 24", (long)tsh_local_size(bias, 0));
    rule.cut = short_of;
    rule.segments = 2;
    CHECK(tsh_parallelize(tsh_root(ctx), &rule, 1) == TSH_ERR_LAYOUT, "20 of 24");
    CHECK(strstr(tsh_last_error(ctx)->message, "\"qkv.weight\""), "sentence");
    tsh_clear_error(ctx);
    return 0;
}

static void fused_groups_have_segments_of_their_own(void **state) {
    (void)state;
    ranks_run(1, fused_groups, NULL);
    ranks_run(2, fused_groups, NULL);
    ranks_run(3, fused_groups, NULL);
    ranks_run(2, unequal_parts, NULL);
}

/* With whole K and V their count is not divided, and they are whole whatever they were before. */
static int whole_shares(tsh_ctx *ctx, void *user) {
    const tsh_plan_rule before = {.path = "**.k_proj", .style = TSH_COLWISE};
    const family *f = families;
    const int r = tsh_tp(ctx)->rank;
    tsh_module *at;
    (void)user;
    while (strcmp(f->note, "one kv head") != 0) f++;
    family_build(ctx, f);
    CHECK(tsh_parallelize(tsh_root(ctx), &before, 1) == TSH_OK, "a plan before");
    CHECK(tsh_parallelize_policy(tsh_root(ctx), tsh_policy_find("qwen2")) == TSH_OK, "policy");
    at = tsh_find(tsh_root(ctx), "model.layers.1.self_attn");
    CHECK(tsh_layout_of(tsh_param(at, "k_proj.weight")).kind == TSH_REPLICATED, "whole keys");
    CHECK(tsh_local_argument(at, "num_heads") == 2 - r, "query heads");
    CHECK(tsh_local_argument(at, "num_key_value_heads") == 1, "key and value heads");
    return 0;
}

static void whole_keys_keep_their_count(void **state) {
    (void)state;
    ranks_run(2, whole_shares, NULL);
}

/* A policy for the blocks, a plan for the rest; on a subtree, and on a block itself. */
static int together(tsh_ctx *ctx, void *user) {
    const tsh_plan_rule rest[] = {{.path = "wte", .style = TSH_ROWWISE},
                                  {.path = "head", .style = TSH_COLWISE}};
    const tsh_embedding_desc table = {.count = 7, .dim = 12};
    tsh_policy alone = *tsh_policy_find("gpt2");
    tsh_module *root = tsh_root(ctx);
    (void)user;
    tsh_add_embedding(root, "wte", &table);
    family_build(ctx, families);
    xlnet_linear(root, "head", 12, 7, 0, 0);
    CHECK(tsh_parallelize(root, rest, 2) == TSH_OK, "plan");
    CHECK(tsh_parallelize_policy(tsh_find(root, "transformer"), &alone) == TSH_OK, "subtree");
    alone.blocks = "";
    CHECK(tsh_parallelize_policy(tsh_find(root, "transformer.h.0"), &alone) == TSH_OK, "again");
    CHECK(tsh_layout_of(tsh_param(root, "wte.weight")).kind == TSH_SHARDED, "plan stays");
    CHECK(tsh_layout_of(tsh_param(root, "transformer.h.1.mlp.c_fc.weight")).dim == 1, "policy");
    return 0;
}

static void a_plan_and_a_policy_go_together(void **state) {
    (void)state;
    ranks_run(2, together, NULL);
}

/* ------------------------------------------------------------------ refusals */

/* What each changes of the xlnet policy or its model, and the sentence then. */
typedef struct refusal {
    const char *what, *sentence;
    tsh_result code;
} refusal;

static const refusal refusals[] = {
    {"blocks",
     "xlnet: \"transformer.layers.*\" matches no block below \"\"; near it are "
     "\"transformer.layer.0\"",
     TSH_ERR_ARGUMENT},
    {"missing",
     "xlnet: block \"transformer.layer.0\" has no parameter \"rel_attn.qq.weight\"; near "
     "it are \"rel_attn.q\"",
     TSH_ERR_ARGUMENT},
    {"bias", "has no parameter \"rel_attn.q.bias\"", TSH_ERR_ARGUMENT},
    {"empty", "has a layer whose weight and bias are both empty", TSH_ERR_ARGUMENT},
    {"none", "has no layer of the list attn_qkv", TSH_ERR_ARGUMENT},
    {"two", "has \"rel_attn.b.weight\" and \"rel_attn.unnamed.bias\" in different layers",
     TSH_ERR_ARGUMENT},
    {"argument",
     "has no argument \"rel_attn.heads\" above 0: tsh_set_argument(module, \"heads\", "
     "count)",
     TSH_ERR_ARGUMENT},
    {"zero", "has no argument \"rel_attn.n_head\" above 0", TSH_ERR_ARGUMENT},
    {"other", "has no argument \"ff.width\" above 0", TSH_ERR_ARGUMENT},
    {"nameless", "is to be cut by heads that have no name", TSH_ERR_ARGUMENT},
    {"heads",
     "cuts \"rel_attn.q.weight\" by heads, but its 6 features do not divide into 4 heads "
     "(\"rel_attn.n_head\")",
     TSH_ERR_SHAPE},
    {"auto", "is to cut \"rel_attn.q.weight\" by heads, but under its style nothing is cut",
     TSH_ERR_ARGUMENT},
    {"kv", "has 3 heads (\"rel_attn.n_head\"), which must be a multiple of 2 key and value heads",
     TSH_ERR_SHAPE},
    {"hidden",
     "has 9 hidden features (\"rel_attn.d_model\"), but \"rel_attn.q.weight\" has 6 for 3 "
     "heads",
     TSH_ERR_SHAPE},
    {"half", "has 3 hidden features (\"rel_attn.d_model\"), but \"rel_attn.o.weight\" has 6",
     TSH_ERR_SHAPE},
    {"reversed", "stores \"rel_attn.q.weight\" reversed, but the policy says (out, in)",
     TSH_ERR_ARGUMENT},
    {"straight", "stores \"rel_attn.r.weight\" (out, in), but the policy says reversed",
     TSH_ERR_ARGUMENT},
    {"fused", "fuses 5 parts in \"rel_attn.q.weight\"; a layer has at most 4", TSH_ERR_ARGUMENT},
    {"parts", "\"transformer.layer.0.ff.layer_1.weight\"", TSH_ERR_LAYOUT},
    {"twice", "both match \"transformer.layer.0.rel_attn.q\"", TSH_ERR_ARGUMENT},
    {"no policy", "those it knows are gpt2 gpt_neo gptj", TSH_ERR_ARGUMENT},
};

/* Changes what `what` says; the model is there. */
static void refusal_change(const char *what, tsh_module *block, tsh_policy *policy,
                           tsh_policy_layer *qkv, tsh_policy_heads *heads) {
    static const char *const unknown[] = {"ff.width", NULL};
    static const tsh_policy_layer parts[] = {{.weight = "ff.layer_1.weight", .n_fused = 2}, {0}};
    tsh_module *rel = tsh_find(block, "rel_attn");
    if (!strcmp(what, "blocks")) policy->blocks = "transformer.layers.*";
    if (!strcmp(what, "missing")) qkv[0].weight = "rel_attn.qq.weight";
    if (!strcmp(what, "bias")) qkv[0].bias = "rel_attn.q.bias";
    if (!strcmp(what, "empty")) qkv[0].weight = NULL;
    if (!strcmp(what, "none")) memset(qkv, 0, sizeof *qkv);
    if (!strcmp(what, "two")) {
        memset(&qkv[0], 0, sizeof qkv[0]);
        qkv[0].weight = "rel_attn.b.weight";
        qkv[0].bias = "rel_attn.unnamed.bias";
    }
    if (!strcmp(what, "argument")) heads->heads = "rel_attn.heads";
    if (!strcmp(what, "zero")) tsh_set_argument(rel, "n_head", 0);
    if (!strcmp(what, "other")) policy->arguments = unknown;
    if (!strcmp(what, "nameless")) heads->heads = NULL;
    if (!strcmp(what, "heads")) {
        tsh_set_argument(rel, "n_head", 4);
        heads->hidden = NULL;
    }
    if (!strcmp(what, "auto")) qkv[0].replace = TSH_AUTO;
    if (!strcmp(what, "kv")) {
        tsh_set_argument(rel, "kv", 2);
        heads->kv_heads = "rel_attn.kv";
    }
    if (!strcmp(what, "hidden")) tsh_set_argument(rel, "d_model", 9);
    if (!strcmp(what, "half")) tsh_set_argument(rel, "d_model", 3);
    if (!strcmp(what, "reversed")) qkv[0].reversed = 0;
    if (!strcmp(what, "straight")) qkv[2].reversed = 1;
    if (!strcmp(what, "fused")) qkv[0].n_fused = 5;
    if (!strcmp(what, "parts")) policy->mlp_in = parts;
    if (!strcmp(what, "twice")) qkv[1] = qkv[0];
}

static int refuse(tsh_ctx *ctx, void *user) {
    const refusal *r = (const refusal *)user;
    tsh_policy policy = xlnet;
    tsh_policy_heads heads = xlnet_heads;
    tsh_policy_layer qkv[COUNT(xlnet_qkv)], out[COUNT(xlnet_out)];
    tsh_module *block = xlnet_block(ctx), *rel = tsh_find(block, "rel_attn");
    int i;
    memcpy(qkv, xlnet_qkv, sizeof qkv);
    memcpy(out, xlnet_out, sizeof out);
    for (i = 0; i < COUNT(qkv) - 1; i++) qkv[i].heads = &heads;
    for (i = 0; i < COUNT(out) - 1; i++) out[i].heads = &heads;
    policy.attn_qkv = qkv;
    policy.attn_out = out;
    refusal_change(r->what, block, &policy, qkv, &heads);
    CHECK(tsh_parallelize_policy(tsh_root(ctx), strcmp(r->what, "no policy") ? &policy : NULL) ==
              r->code,
          "%s", r->what);
    CHECK(strstr(tsh_last_error(ctx)->message, r->sentence), "%s", r->what);
    tsh_clear_error(ctx);
    CHECK(tsh_layout_of(tsh_param(block, "ff.layer_1.weight")).kind == TSH_REPLICATED,
          "%s: nothing is changed", r->what);
    CHECK(tsh_local_argument(rel, "d_model") == tsh_argument(rel, "d_model"),
          "%s: nothing is divided", r->what);
    return 0;
}

static void policies_that_do_not_fit_are_refused(void **state) {
    int i;
    (void)state;
    for (i = 0; i < COUNT(refusals); i++) {
        refusal r = refusals[i];
        ranks_run(1, refuse, &r);
        ranks_run(3, refuse, &r);
    }
}

static int arguments(tsh_ctx *ctx, void *user) {
    tsh_module *root = tsh_root(ctx);
    (void)user;
    CHECK(tsh_set_argument(root, "heads", 3) == TSH_OK, "set");
    CHECK(tsh_set_argument(root, "heads", 5) == TSH_OK, "again");
    CHECK(tsh_argument(root, "heads") == 5 && tsh_local_argument(root, "heads") == 5, "the last");
    CHECK(tsh_argument(root, "width") == 0, "unknown");
    CHECK(strstr(tsh_last_error(ctx)->message, "tsh_argument: \"\" has no argument \"width\""),
          "1");
    tsh_clear_error(ctx);
    CHECK(tsh_local_argument(root, NULL) == 0, "no name");
    CHECK(strstr(tsh_last_error(ctx)->message, "tsh_local_argument"), "2");
    tsh_clear_error(ctx);
    CHECK(tsh_set_argument(root, "a.b", 1) == TSH_ERR_ARGUMENT, "a dot");
    CHECK(strstr(tsh_last_error(ctx)->message, "cannot have \"a.b\" = 1"), "3");
    tsh_clear_error(ctx);
    CHECK(tsh_set_argument(root, "a", -1) == TSH_ERR_ARGUMENT, "negative");
    tsh_clear_error(ctx);
    CHECK(tsh_set_argument(root, "", 1) == TSH_ERR_ARGUMENT, "empty");
    tsh_clear_error(ctx);
    CHECK(tsh_set_argument(NULL, "a", 1) == TSH_ERR_ARGUMENT, "no module");
    CHECK(tsh_argument(NULL, "a") == 0 && tsh_parallelize_policy(NULL, &xlnet) == TSH_ERR_ARGUMENT,
          "no module");
    return 0;
}

static void arguments_are_named_counts(void **state) {
    (void)state;
    ranks_run(1, arguments, NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_family_equals_the_dense_model),
        cmocka_unit_test(every_shipped_policy_is_among_them),
        cmocka_unit_test(ranks_hold_what_one_counts_by_hand),
        cmocka_unit_test(lists_may_mix_fused_and_reversed_layers),
        cmocka_unit_test(fused_groups_have_segments_of_their_own),
        cmocka_unit_test(whole_keys_keep_their_count),
        cmocka_unit_test(a_plan_and_a_policy_go_together),
        cmocka_unit_test(policies_that_do_not_fit_are_refused),
        cmocka_unit_test(arguments_are_named_counts),
    };
    return cmocka_run_group_tests_name("layer/policies", tests, NULL, NULL);
}
