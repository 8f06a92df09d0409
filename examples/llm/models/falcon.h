/* falcon.h - Falcon (Almazrouei et al. 2023): attention and MLP in parallel; all query heads share
 * one key head, or each group of them has one; one fused weight for queries, keys and values. */
#ifndef LLM_FALCON_H
#define LLM_FALCON_H

/* Bits of c->variant. FALCON_GROUPS: several key heads, each for a group of query heads.
 * FALCON_TWO_NORMS: parallel attention and MLP have a norm each. FALCON_ONE_KEY: one key head for
 * all query heads. */
enum { FALCON_GROUPS = 1, FALCON_TWO_NORMS = 2, FALCON_ONE_KEY = 4 };

static void falcon_config(llm_config *c) {
    llm_read_sizes(c);
    const int groups = llm_config_flag(c, "new_decoder_architecture", 0);
    const int one = llm_config_flag(c, "multi_query", 1) && !groups;
    const double kv = llm_config_number(c, "num_kv_heads|n_head_kv", (double)c->heads);
    c->kv_heads = one ? 1 : groups ? (int64_t)kv : c->heads;
    c->hidden = llm_config_count(c, "ffn_hidden_size", 4 * (double)c->width);
    c->norm = LLM_LAYER;
    c->eps = llm_config_number(c, "layer_norm_epsilon", 1e-5);
    llm_read_activation(c, "activation", "gelu");
    c->qkv_bias = c->out_bias = c->mlp_bias = llm_config_flag(c, "bias", 0);
    c->tied = llm_config_flag(c, "tie_word_embeddings", 1);
    c->parallel = llm_config_flag(c, "parallel_attn", 1);
    llm_config_must(c, "alibi", 0, 0);
    const int64_t norms = llm_config_count(c, "num_ln_in_parallel_attn", groups ? 2 : 1);
    c->variant = (groups ? FALCON_GROUPS : 0) | (one ? FALCON_ONE_KEY : 0) |
                 (norms == 2 && c->parallel ? FALCON_TWO_NORMS : 0);
    llm_read_rope(c, 10000, 1);
    if (!c->error[0] && (c->kv_heads < 1 || c->heads % c->kv_heads))
        llm_refuse(c, "config.json: num_kv_heads is %g, with %d heads", kv, (int)c->heads);
}

/* Runs a block. If c->parallel: x += attention(norm(x)) + mlp(norm'(x)), where both may be the same
 * norm; otherwise: x += attention(norm(x)); x += mlp(norm'(x)). */
static tsh_tensor *falcon_block(tsh_module *self, tsh_tensor **in, int n, void *user) {
    const llm_config *c = ((const llm_net *)user)->config;
    const int two = (c->variant & FALCON_TWO_NORMS) != 0;
    tsh_tensor *x = in[0], *y = llm_call(self, two ? "ln_attn" : "input_layernorm", x);
    tsh_tensor *sum = tsh_add(x, llm_call(self, "self_attention", y));
    (void)n;
    if (two) y = llm_call(self, "ln_mlp", x);
    if (!c->parallel) y = llm_call(self, "post_attention_layernorm", sum);
    return tsh_add(sum, llm_call(self, "mlp", y));
}

static void falcon_add_block(llm_net *m, tsh_module *self) {
    const llm_config *c = m->config;
    const int two = (c->variant & FALCON_TWO_NORMS) != 0;
    const tsh_attention_layer_desc attention = {
        .fused = "query_key_value", .by_group = !(c->variant & FALCON_ONE_KEY), .out = "dense"};
    static const tsh_mlp_desc mlp = {.up = "dense_h_to_4h", .down = "dense_4h_to_h"};
    llm_add_norm(m, self, two ? "ln_attn" : "input_layernorm", c->width);
    if (two) llm_add_norm(m, self, "ln_mlp", c->width);
    if (!c->parallel) llm_add_norm(m, self, "post_attention_layernorm", c->width);
    llm_add_attention(m, self, "self_attention", &attention);
    llm_add_mlp(m, self, "mlp", &mlp);
}

static void falcon_add(llm_net *m) {
    llm_add_embedding(m, m->base, "word_embeddings");
    llm_add_blocks(m, m->base, "h", falcon_block, falcon_add_block);
    llm_add_norm(m, m->base, "ln_f", m->config->width);
    llm_add_head(m, "lm_head", 0, "word_embeddings");
}

static tsh_tensor *falcon_embed(llm_net *m, tsh_tensor *ids) {
    return llm_call(m->base, "word_embeddings", ids);
}

static tsh_tensor *falcon_finish(llm_net *m, tsh_tensor *x) {
    return llm_head(m, "lm_head", llm_call(m->base, "ln_f", llm_last(m, x)));
}

static const llm_family falcon_family = {"falcon",     "transformer", falcon_config, falcon_add,
                                         falcon_embed, falcon_finish, NULL};

#endif
