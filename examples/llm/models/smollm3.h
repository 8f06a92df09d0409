/* smollm3.h - SmolLM3 (Hugging Face 2025): LLaMA in which every fourth layer has no rotary
 * positions. */
#ifndef LLM_SMOLLM3_H
#define LLM_SMOLLM3_H

static void smollm3_config(llm_config *c) {
    llama_sizes(c, 1e-6, 1);
    c->kv_heads = llm_config_count(c, "num_key_value_heads", 4);
    llm_read_activation(c, "hidden_act", "silu");
    c->qkv_bias = c->out_bias = llm_config_flag(c, "attention_bias", 0);
    c->mlp_bias = llm_config_flag(c, "mlp_bias", 0);
    llm_read_rope(c, 2000000, 1);
    const int slides = llm_config_flag(c, "use_sliding_window", 0);
    llm_read_window(c, 0, 0, 0);
    if (!slides) c->window = 0;
    /* no_rope_layers is a list with a 1 for each layer with rotary positions, and a 0 for the
     * others */
    const cJSON *rotates = llm_config_key(c, "no_rope_layers"), *item;
    const int64_t interval = llm_config_count(c, "no_rope_layer_interval", 4);
    int64_t i = 0;
    if (rotates && cJSON_GetArraySize(rotates) != c->layers)
        llm_refuse(c, "config.json: no_rope_layers has %d values for %d layers",
                   cJSON_GetArraySize(rotates), (int)c->layers);
    for (i = 0; i < c->layers && i < LLM_MOST_LAYERS && interval > 0; i++)
        c->no_rope[i] = (i + 1) % interval == 0;
    i = 0;
    cJSON_ArrayForEach(item, rotates) {
        if (!cJSON_IsNumber(item) && !cJSON_IsBool(item))
            llm_refuse_value(c, "no_rope_layers", rotates, "it must be a list of 0 and 1");
        if (i < LLM_MOST_LAYERS) c->no_rope[i++] = !cJSON_IsTrue(item) && item->valuedouble == 0;
    }
    /* without layer_types, the layers without rotary positions have the sliding window */
    if (!llm_config_key(c, "layer_types"))
        memcpy(c->slides, c->no_rope, sizeof c->slides);
}

static const llm_family smollm3_family = {
    "smollm3", "model", smollm3_config, llama_add, llama_embed, llama_finish, NULL};

#endif
