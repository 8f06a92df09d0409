/* gemma2.h - Gemma 2 (Riviere et al. 2024): Gemma with norms also after attention and MLP, soft
 * caps of scores and logits, and a sliding window in every other layer. Gemma 3 (Kamath et al.
 * 2025): no caps, but norms of queries and keys, five layers with a window to each one without, and
 * different rotary bases for the two. Its folders with a vision tower are refused. */
#ifndef LLM_GEMMA2_H
#define LLM_GEMMA2_H

/* Reads a soft cap, the s of s tanh(x / s); `otherwise` if the key is absent. Returns 0, no cap,
 * for null; refuses a 0 in the file. */
static double gemma2_cap(llm_config *c, const char *key, double otherwise) {
    const int there = cJSON_GetObjectItemCaseSensitive(c->unread, key) != NULL;
    const double cap = llm_config_number(c, key, there ? 0 : otherwise);
    if (cap == 0 && llm_config_key(c, key))
        llm_refuse(c, "config.json: %s is 0; null is none", key);
    return cap;
}

/* Reads what Gemma 2 and 3 have in common. score_cap, logit_cap: default soft caps of attention
 * scores and logits, 0: none. Every `pattern`-th layer has no sliding window. */
static void gemma2_options(llm_config *c, double score_cap, double logit_cap, int64_t pattern) {
    gemma_options(c);
    gemma_read_activation(c, "hidden_activation", "hidden_act");
    c->scale = 1 / sqrt(llm_config_number(c, "query_pre_attn_scalar", 256));
    c->score_cap = gemma2_cap(c, "attn_logit_softcapping", score_cap);
    c->logit_cap = gemma2_cap(c, "final_logit_softcapping", logit_cap);
    llm_read_window(c, 4096, 0, pattern);
}

static void gemma2_config(llm_config *c) {
    gemma2_options(c, 50, 30, 2);
    llm_read_rope(c, 10000, 1);
}

/* Moves the items of the object `from` into the object `to`, where they replace those of the same
 * key. */
static void gemma3_merge(cJSON *to, cJSON *from) {
    while (from->child) {
        cJSON *item = cJSON_DetachItemViaPointer(from, from->child);
        cJSON_DeleteItemFromObjectCaseSensitive(to, item->string);
        cJSON_AddItemToArray(to, item); /* the item keeps its key, so nothing is allocated */
    }
}

/* Reads rotary positions: c->rope of layers with full attention, c->local of those with a sliding
 * window. rope_parameters has an object for each of the two; keys of the older rope_scaling
 * override those for full attention. */
static void gemma3_read_rope(llm_config *c) {
    const cJSON *both = llm_config_key(c, "rope_parameters"), *part;
    const cJSON *whole = cJSON_GetObjectItemCaseSensitive(both, "full_attention");
    if (both && !cJSON_IsObject(both))
        llm_refuse_value(c, "rope_parameters", both, "it must be an object");
    (void)llm_config_key(c, "rope_scaling");
    cJSON *older = cJSON_GetObjectItemCaseSensitive(c->read, "rope_scaling");
    cJSON_ArrayForEach(part, both)
        if (!part->string || (strcmp(part->string, "full_attention") != 0 &&
                              strcmp(part->string, "sliding_attention") != 0))
            llm_refuse_value(c, "rope_parameters", both, "gemma3_text has full_attention and "
                                                         "sliding_attention in it");
    if (older && !cJSON_IsObject(older) && !cJSON_IsNull(older))
        llm_refuse_value(c, "rope_scaling", older, "it must be an object");
    if (cJSON_IsObject(older) && cJSON_IsObject(whole))
        gemma3_merge(cJSON_GetObjectItemCaseSensitive(both, "full_attention"), older);
    llm_set_rope(c, cJSON_GetObjectItemCaseSensitive(both, "sliding_attention"),
                 llm_config_number(c, "rope_local_base_freq", 10000), 1, 0);
    c->local = c->rope;
    if (c->local.limit > 0)
        llm_refuse(c, "config.json: the rotary scaling of sliding_attention is \"%s\", which is "
                      "not supported", c->local.kind);
    llm_set_rope(c, cJSON_IsObject(whole) || !cJSON_IsObject(older) ? whole : older,
                 llm_config_number(c, "rope_theta", 1000000), 1, 0);
}

static void gemma3_config(llm_config *c) {
    gemma2_options(c, 0, 0, llm_config_count(c, "sliding_window_pattern", 6));
    /* refused: in the library transformers, not all functions of attention apply the cap */
    if (c->score_cap > 0)
        llm_refuse(c, "config.json: attn_logit_softcapping is %g, which is not supported for %s",
                   c->score_cap, c->type);
    c->qk_norm = LLM_NORM_OF_EACH;
    gemma3_read_rope(c);
}

/* Runs a block: x += norm2(attention(norm1(x))); x += norm4(mlp(norm3(x))). */
static tsh_tensor *gemma2_block(tsh_module *self, tsh_tensor **in, int n, void *user) {
    tsh_tensor *x = in[0], *y = llm_call(self, "self_attn", llm_call(self, "input_layernorm", x));
    (void)n, (void)user;
    y = tsh_forward_residual(tsh_find(self, "pre_feedforward_layernorm"), &x,
                             llm_call(self, "post_attention_layernorm", y));
    return tsh_add(x, llm_call(self, "post_feedforward_layernorm", llm_call(self, "mlp", y)));
}

static void gemma2_add_block(llm_net *m, tsh_module *self) {
    llama_add_layer(m, self, &llama_attention, &llama_mlp);
    llm_add_norm(m, self, "pre_feedforward_layernorm", m->config->width);
    llm_add_norm(m, self, "post_feedforward_layernorm", m->config->width);
}

static void gemma2_add(llm_net *m) {
    llama_add_with(m, gemma2_block, gemma2_add_block);
}

static const llm_family gemma2_family = {"gemma2",    "model",      gemma2_config, gemma2_add,
                                         llama_embed, llama_finish, NULL};
static const llm_family gemma3_family = {"gemma3_text", "model",      gemma3_config, gemma2_add,
                                         llama_embed,   llama_finish, NULL};

#endif
