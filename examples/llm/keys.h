/* keys.h - keys of config.json that no model family reads: those that change nothing, and those
 * that are supported with one value only. tests/llm/config_keys.txt lists every key that
 * transformers' classes have for these families, and how it is treated. Include tshard.h first;
 * needs cJSON. */
#ifndef LLM_KEYS_H
#define LLM_KEYS_H

#include "json.h"

#include <cjson/cJSON.h>
#include <string.h>

/* Keys that do not change the logits, whatever their value: where a file comes from, which class
 * reads it, how the model was trained, options of heads that are not loaded, how fast it is
 * computed. */
static const char llm_harmless_keys[] =
    /* what the file is, and which program reads it */
    " architectures attribute_map auto_map custom_pipelines is_llama_config model_max_length "
    "name_or_path prefix sentence_transformers task_specific_params tokenizer_class "
    "transformers_version transformers.js_config "
    /* special tokens: llm_read_eos reads the ids that end a text; the tokenizer has all others */
    "bos_token bos_token_id cls_token_id decoder_start_token_id eos_token eos_token_id "
    "mask_token_id pad_token pad_token_id sep_token_id unk_token unk_token_id "
    /* options of training: dropout, initial values and the like */
    "activation_dropout attention_dropout attention_probs_dropout_prob attn_pdrop "
    "classifier_dropout classifier_dropout_prob dropout embd_pdrop embed_dropout "
    "embedding_dropout gradient_checkpointing hidden_dropout hidden_dropout_prob init_std "
    "initializer_factor initializer_range layerdrop resid_pdrop residual_dropout "
    "summary_first_dropout "
    /* heads that are not loaded, and what their outputs mean */
    "finetuning_task id2label label2id num_labels pooler_fc_size pooler_num_attention_heads "
    "pooler_num_fc_layers pooler_size_per_head pooler_type predict_special_tokens problem_type "
    "sbert_ce_default_activation_function summary_activation summary_proj_to_labels summary_type "
    "summary_use_proj "
    /* how a program computes the same result, and what else it returns */
    "attention_softmax_in_fp32 attn_implementation bias_dropout_fusion cache_implementation "
    "chunk_size_feed_forward experts_implementation masked_softmax_fusion output_attentions "
    "output_hidden_states output_past pretraining_tp reorder_and_upcast_attn return_dict "
    "scale_attention_softmax_in_fp32 slow_but_exact tf_legacy_loss tie_last_hidden_states "
    "torchscript use_bfloat16 use_cache use_flash_attn "
    /* keys that repeat what other keys say, or that no class reads */
    "directionality is_decoder max_position_embeddings max_sequence_length max_window_layers n_ctx "
    "n_special offset_alibi seq_length skip_bias_add skip_bias_add_qkv "
    /* how generate() of transformers draws tokens */
    "assistant_confidence_threshold assistant_lookbehind bad_words_ids begin_suppress_tokens "
    "diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size "
    "encoder_repetition_penalty epsilon_cutoff eta_cutoff exponential_decay_length_penalty "
    "forced_bos_token_id forced_eos_token_id length_penalty max_length max_new_tokens "
    "min_length min_new_tokens no_repeat_ngram_size num_assistant_tokens "
    "num_assistant_tokens_schedule num_beam_groups num_beams num_return_sequences "
    "output_scores remove_invalid_values renormalize_logits repetition_penalty "
    "return_dict_in_generate suppress_tokens target_lookbehind temperature top_k top_p "
    "typical_p ";

/* A key of config.json that must have one certain value, or be null. families: the model types that
 * this holds for, with a blank before and after each; NULL: all. */
typedef struct llm_fixed_key {
    const char *name, *value; /* the key; its only value, as cJSON prints it, without blanks */
    const char *families;
} llm_fixed_key;
static const llm_fixed_key llm_fixed_keys[] = {
    {"add_cross_attention", "false", NULL},
    /* checked for falcon only: models of the family bloom may have either value */
    {"apply_residual_connection_post_layernorm", "false", " falcon "},
    {"attention_bias", "false", " mistral phi3 "},
    {"cross_attention_hidden_size", "null", NULL},
    {"ff_factor", "4", " falcon "},
    {"full_attn_mod", "1", " phi3 "},
    {"interpolate_factor", "1", " phi3 "},
    {"is_encoder_decoder", "false", NULL},
    {"lm_head_bias", "false", NULL},
    {"mlp_bias", "false", " mistral phi3 qwen2 qwen3 olmo2 "},
    {"n_inner", "null", " bloom "},
    {"per_layer_config", "{}", NULL},
    {"pruned_heads", "{}", NULL},
    {"quantization_config", "{}", NULL},
    {"rope_interleaved", "false", NULL},
    {"sliding_window_pattern", "2", " gemma2 "},
    {"tie_encoder_decoder", "false", NULL},
    {"use_bidirectional_attention", "false", NULL},
    {"use_mrope", "false", NULL},
    {"use_sliding_window", "false", NULL},
};

/* Returns the row of llm_fixed_keys for a key in the config.json of a family; NULL: there is
 * none. */
LLM_JSON_API const llm_fixed_key *llm_fixed_key_find(const char *key, const char *family) {
    char word[80];
    snprintf(word, sizeof word, " %.70s ", family);
    for (size_t i = 0; i < sizeof llm_fixed_keys / sizeof *llm_fixed_keys; i++) {
        const llm_fixed_key *row = &llm_fixed_keys[i];
        if (strcmp(row->name, key) == 0 && (!row->families || strstr(row->families, word)))
            return row;
    }
    return NULL;
}

/* Returns 1 if a key of config.json changes nothing: it is null, or one of llm_harmless_keys, or a
 * note of the program that wrote it, whose name begins with _ or unsloth_. */
LLM_JSON_API int llm_key_is_harmless(const cJSON *item) {
    char word[80];
    snprintf(word, sizeof word, " %.70s ", item->string);
    return cJSON_IsNull(item) || item->string[0] == '_' ||
           strncmp(item->string, "unsloth_", 8) == 0 ||
           (strlen(item->string) < 70 && !strchr(item->string, ' ') &&
            strstr(llm_harmless_keys, word) != NULL);
}

#endif
