/* bert.h - BERT (Devlin et al. 2019) and RoBERTa (Liu et al. 2019): encoders, which give a vector
 * per token. Layer norms follow attention and MLP; positions are learned. */
#ifndef LLM_BERT_H
#define LLM_BERT_H

static void bert_config(llm_config *c) {
    llm_read_sizes(c);
    c->hidden = llm_config_count(c, "intermediate_size", LLM_NEEDED);
    c->norm = LLM_LAYER;
    c->eps = llm_config_number(c, "layer_norm_eps", 1e-12);
    llm_read_activation(c, "hidden_act", "gelu");
    c->qkv_bias = c->out_bias = c->mlp_bias = c->encoder = 1;
    c->places = llm_config_count(c, "max_position_embeddings", 512);
    c->kinds = llm_config_count(c, "type_vocab_size", 2);
    (void)llm_config_flag(c, "tie_word_embeddings", 1); /* unused: the head is not loaded */
    llm_config_must(c, "is_decoder", 0, 0);
    llm_config_must(c, "add_cross_attention", 0, 0);
    const char *places = llm_config_string(c, "position_embedding_type", "absolute");
    if (strcmp(places, "absolute") != 0)
        llm_refuse(c, "config.json: position_embedding_type is \"%s\"; supported is absolute",
                   places);
}

/* Reads the keys of RoBERTa. Its position 0 is row pad_token_id + 1 of the position table; the rows
 * before it are not used. */
static void roberta_config(llm_config *c) {
    bert_config(c);
    c->skip = llm_config_count(c, "pad_token_id", 1) + 1;
    c->places -= c->skip;
}

/* Runs a block: x = norm(x + attention(x)); x = norm'(x + mlp(x)). */
static tsh_tensor *bert_block(tsh_module *self, tsh_tensor **in, int n, void *user) {
    tsh_tensor *x = in[0], *y = llm_call(self, "attention", x);
    (void)n, (void)user;
    y = tsh_forward_residual(tsh_find(self, "attention_norm"), &x, y);
    return llm_call(self, "norm", tsh_add(y, llm_call(self, "mlp", y)));
}

static void bert_add_block(llm_net *m, tsh_module *self) {
    static const tsh_attention_layer_desc attention = {
        .q = "query", .k = "key", .v = "value", .out = "out"};
    static const tsh_mlp_desc mlp = {.up = "up", .down = "down"};
    llm_add_attention(m, self, "attention", &attention);
    llm_add_norm(m, self, "attention_norm", m->config->width);
    llm_add_mlp(m, self, "mlp", &mlp);
    llm_add_norm(m, self, "norm", m->config->width);
}

static const tsh_rename bert_names[] = {
    {"**.attention.self.query.**", "**.attention.query.**"},
    {"**.attention.self.key.**", "**.attention.key.**"},
    {"**.attention.self.value.**", "**.attention.value.**"},
    {"**.attention.output.dense.**", "**.attention.out.**"},
    {"**.attention.output.LayerNorm.*", "**.attention_norm.*"},
    {"**.intermediate.dense.**", "**.mlp.up.**"},
    {"**.output.dense.**", "**.mlp.down.**"},
    {"**.output.LayerNorm.*", "**.norm.*"},
    {NULL, NULL}};

static void bert_add(llm_net *m) {
    const tsh_embedding_desc kinds = {.count = m->config->kinds, .dim = m->config->width};
    tsh_module *embeddings = tsh_add_module(m->base, "embeddings", NULL);
    llm_add_embedding(m, embeddings, "word_embeddings");
    llm_add_places(m, embeddings, "position_embeddings", m->config->skip);
    tsh_add_embedding(embeddings, "token_type_embeddings", &kinds);
    llm_add_norm(m, embeddings, "LayerNorm", m->config->width);
    llm_add_blocks(m, tsh_add_module(m->base, "encoder", NULL), "layer", bert_block,
                   bert_add_block);
}

/* Adds the embeddings of words, positions and token types; all tokens have type 0, as those of a
 * single sentence. */
static tsh_tensor *bert_embed(llm_net *m, tsh_tensor *ids) {
    tsh_module *embeddings = tsh_find(m->base, "embeddings");
    tsh_tensor *kind = tsh_cast(tsh_zeros(m->ctx, tsh_shape_of(ids)), TSH_I32);
    tsh_tensor *x = llm_call(embeddings, "word_embeddings", ids);
    x = tsh_add(x, llm_call(embeddings, "token_type_embeddings", kind));
    x = tsh_add(x, llm_call(embeddings, "position_embeddings",
                            llm_places(m, ids, m->config->skip)));
    return llm_call(embeddings, "LayerNorm", x);
}

static const llm_family bert_family = {"bert",     "bert", bert_config, bert_add,
                                       bert_embed, NULL,   bert_names};
static const llm_family roberta_family = {"roberta",  "roberta", roberta_config, bert_add,
                                          bert_embed, NULL,      bert_names};

#endif
