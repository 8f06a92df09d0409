/* granite.h - Granite 3 (IBM 2024): Llama, whose embeddings, attention
 * scores, residual branches and logits are multiplied by constants. */
#ifndef LLM_GRANITE_H
#define LLM_GRANITE_H

static void granite_config(llm_config *c) {
    llama_config(c);
    c->embed_scale = llm_config_number(c, "embedding_multiplier", 1);
    c->scale = llm_config_number(c, "attention_multiplier", 1);
    c->branch_scale = llm_config_number(c, "residual_multiplier", 1);
    c->logit_scale = 1 / llm_config_number(c, "logits_scaling", 1);
}

static const llm_family granite_family = {"granite", "model", granite_config, llama_add,
                                          llama_forward, NULL};

#endif
