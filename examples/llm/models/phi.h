/* phi.h - Phi-1 to Phi-2 (Gunasekar et al. 2023): attention and MLP in parallel after one layer
 * norm, biases everywhere, rotary positions on a part of each head. */
#ifndef LLM_PHI_H
#define LLM_PHI_H

static void phi_config(llm_config *c) {
    llm_read_sizes(c);
    c->hidden = llm_config_count(c, "intermediate_size", LLM_NEEDED);
    c->norm = LLM_LAYER;
    c->eps = llm_config_number(c, "layer_norm_eps", 1e-5);
    llm_read_activation(c, "hidden_act", "gelu_new");
    c->qkv_bias = c->out_bias = c->mlp_bias = 1;
    c->tied = llm_config_flag(c, "tie_word_embeddings", 0);
    llm_config_must(c, "qk_layernorm", 0, 0);
    c->turns_part = 1;
    llm_read_rope(c, 10000, 0.5);
}

/* Runs a block: x += attention(norm(x)) + mlp(norm(x)). */
static tsh_tensor *phi_block(tsh_module *self, tsh_tensor **in, int n, void *user) {
    tsh_tensor *x = in[0], *y = llm_call(self, "input_layernorm", x);
    (void)n, (void)user;
    return tsh_add(tsh_add(llm_call(self, "self_attn", y), llm_call(self, "mlp", y)), x);
}

static void phi_add_block(llm_net *m, tsh_module *self) {
    static const tsh_attention_layer_desc attention = {.out = "dense"};
    static const tsh_mlp_desc mlp = {.up = "fc1", .down = "fc2"};
    llm_add_norm(m, self, "input_layernorm", m->config->width);
    llm_add_attention(m, self, "self_attn", &attention);
    llm_add_mlp(m, self, "mlp", &mlp);
}

static void phi_add(llm_net *m) {
    llm_add_embedding(m, m->base, "embed_tokens");
    llm_add_blocks(m, m->base, "layers", phi_block, phi_add_block);
    llm_add_norm(m, m->base, "final_layernorm", m->config->width);
    llm_add_head(m, "lm_head", 1, "embed_tokens");
}

static tsh_tensor *phi_embed(llm_net *m, tsh_tensor *ids) {
    return llm_call(m->base, "embed_tokens", ids);
}

static tsh_tensor *phi_finish(llm_net *m, tsh_tensor *x) {
    return llm_head(m, "lm_head", llm_call(m->base, "final_layernorm", llm_last(m, x)));
}

static const llm_family phi_family = {"phi",     "model",    phi_config, phi_add,
                                      phi_embed, phi_finish, NULL};

#endif
