/* bloom.h - BLOOM (Le Scao et al. 2022): ALiBi in place of learned or rotary positions, and a layer
 * norm after the embedding. */
#ifndef LLM_BLOOM_H
#define LLM_BLOOM_H

static void bloom_config(llm_config *c) {
    llm_read_sizes(c);
    c->hidden = 4 * c->width;
    c->norm = LLM_LAYER;
    c->eps = llm_config_number(c, "layer_norm_epsilon", 1e-5);
    c->act = TSH_GELU_TANH;
    c->qkv_bias = c->out_bias = c->mlp_bias = 1;
    c->tied = llm_config_flag(c, "tie_word_embeddings", 1);
    c->variant = llm_config_flag(c, "apply_residual_connection_post_layernorm", 0);
}

/* Runs a block: x += attention(norm(x)); x += mlp(norm'(x)). If c->variant is 1, attention and MLP
 * are added to the norm's output in place of x. */
static tsh_tensor *bloom_block(tsh_module *self, tsh_tensor **in, int n, void *user) {
    const llm_net *m = (const llm_net *)user;
    const llm_config *c = m->config;
    tsh_tensor *x = in[0], *y = llm_call(self, "input_layernorm", x);
    /* Without a cache, each block makes the mask anew: backward may run the block again after
     * another forward, so m->bias would not do. */
    tsh_tensor *read[2] = {y, m->cache ? m->bias : llm_alibi(m, tsh_size(x, 1))};
    (void)n;
    x = tsh_add(c->variant ? y : x, tsh_forward_n(tsh_find(self, "self_attention"), read, 2));
    y = llm_call(self, "post_attention_layernorm", x);
    return tsh_add(c->variant ? y : x, llm_call(self, "mlp", y));
}

static void bloom_add_block(llm_net *m, tsh_module *self) {
    static const tsh_attention_layer_desc attention = {
        .fused = "query_key_value", .by_group = 1, .out = "dense"};
    static const tsh_mlp_desc mlp = {.up = "dense_h_to_4h", .down = "dense_4h_to_h"};
    llm_add_norm(m, self, "input_layernorm", m->config->width);
    llm_add_attention(m, self, "self_attention", &attention);
    llm_add_norm(m, self, "post_attention_layernorm", m->config->width);
    llm_add_mlp(m, self, "mlp", &mlp);
}

static void bloom_add(llm_net *m) {
    llm_add_embedding(m, m->base, "word_embeddings");
    llm_add_norm(m, m->base, "word_embeddings_layernorm", m->config->width);
    llm_add_blocks(m, m->base, "h", bloom_block, bloom_add_block);
    llm_add_norm(m, m->base, "ln_f", m->config->width);
    llm_add_head(m, "lm_head", 0, "word_embeddings");
    llm_add_slopes(m);
}

static tsh_tensor *bloom_embed(llm_net *m, tsh_tensor *ids) {
    if (m->cache) m->bias = llm_alibi(m, llm_keys(m, ids));
    return llm_call(m->base, "word_embeddings_layernorm",
                    llm_call(m->base, "word_embeddings", ids));
}

static tsh_tensor *bloom_finish(llm_net *m, tsh_tensor *x) {
    return llm_head(m, "lm_head", llm_call(m->base, "ln_f", llm_last(m, x)));
}

static const llm_family bloom_family = {"bloom",     "transformer", bloom_config, bloom_add,
                                        bloom_embed, bloom_finish,  NULL};

#endif
