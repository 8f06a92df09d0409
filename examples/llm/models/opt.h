/* opt.h - OPT (Zhang et al. 2022): learned positions, the first in row 2 of their table; layer
 * norms before attention and MLP; ReLU. */
#ifndef LLM_OPT_H
#define LLM_OPT_H

static void opt_config(llm_config *c) {
    llm_read_sizes(c);
    c->hidden = llm_config_count(c, "ffn_dim", LLM_NEEDED);
    c->places = llm_config_count(c, "max_position_embeddings", 2048);
    c->norm = LLM_LAYER;
    c->eps = 1e-5;
    llm_read_activation(c, "activation_function", "relu");
    c->qkv_bias = c->out_bias = c->mlp_bias = 1;
    c->tied = llm_config_flag(c, "tie_word_embeddings", 1);
    llm_config_must(c, "do_layer_norm_before", 1, 1);
    llm_config_must(c, "_remove_final_layer_norm", 0, 0);
    llm_config_must(c, "enable_bias", 1, 1);
    llm_config_must(c, "layer_norm_elementwise_affine", 1, 1);
    const double embed = llm_config_number(c, "word_embed_proj_dim", (double)c->width);
    if (embed != (double)c->width)
        llm_refuse(c, "config.json: word_embed_proj_dim is %g; supported is hidden_size, %d", embed,
                   (int)c->width);
}

static tsh_tensor *opt_block(tsh_module *self, tsh_tensor **in, int n, void *user) {
    tsh_tensor *x = in[0];
    tsh_tensor *y = llm_call(self, "self_attn", llm_call(self, "self_attn_layer_norm", x));
    (void)n, (void)user;
    y = tsh_forward_residual(tsh_find(self, "final_layer_norm"), &x, y);
    return tsh_add(x, llm_call(self, "mlp", y));
}

static void opt_add_block(llm_net *m, tsh_module *self) {
    static const tsh_attention_layer_desc attention = {.out = "out_proj"};
    static const tsh_mlp_desc mlp = {.up = "fc1", .down = "fc2"};
    llm_add_attention(m, self, "self_attn", &attention);
    llm_add_norm(m, self, "self_attn_layer_norm", m->config->width);
    llm_add_mlp(m, self, "mlp", &mlp);
    llm_add_norm(m, self, "final_layer_norm", m->config->width);
}

static void opt_add(llm_net *m) {
    tsh_module *decoder = tsh_add_module(m->base, "decoder", NULL);
    llm_add_embedding(m, decoder, "embed_tokens");
    llm_add_places(m, decoder, "embed_positions", 2);
    llm_add_blocks(m, decoder, "layers", opt_block, opt_add_block);
    llm_add_norm(m, decoder, "final_layer_norm", m->config->width);
    llm_add_head(m, "lm_head", 0, "decoder.embed_tokens");
}

static tsh_tensor *opt_embed(llm_net *m, tsh_tensor *ids) {
    tsh_tensor *x = llm_call(m->base, "decoder.embed_tokens", ids);
    return tsh_add(x, llm_call(m->base, "decoder.embed_positions", llm_places(m, ids, 2)));
}

static tsh_tensor *opt_finish(llm_net *m, tsh_tensor *x) {
    return llm_head(m, "lm_head", llm_call(m->base, "decoder.final_layer_norm", llm_last(m, x)));
}

static const tsh_rename opt_names[] = {{"**.fc1.**", "**.mlp.fc1.**"},
                                       {"**.fc2.**", "**.mlp.fc2.**"},
                                       {NULL, NULL}};

static const llm_family opt_family = {"opt",     "model",    opt_config, opt_add,
                                      opt_embed, opt_finish, opt_names};

#endif
