/* data_json.h - makes sequences of tokens from lines of JSON, in the forms of TRL that data.h
 * lists. Include data.h. */
#ifndef LLM_DATA_JSON_H
#define LLM_DATA_JSON_H

#include "data_file.h"
#include "json.h"

/* -- texts that are no conversations --------------------------------------------- */

/* Sets *eos to the end-of-text token. Returns the token's length; 0: it is not to be appended to
 * the text, which ends with it, or there is no such token. */
static size_t llm_data_eos(const llm_data *d, const char *text, const char **eos) {
    const size_t length = strlen(text);
    *eos = d->desc.eos ? d->desc.eos : d->desc.format ? d->desc.format->eos : NULL;
    const size_t n = *eos ? strlen(*eos) : 0;
    return n > 0 && (n > length || strcmp(text + length - n, *eos) != 0) ? n : 0;
}

/* Tokenizes a prompt of n bytes, an answer and the end-of-text token as one text. Sets
 * tokens->prompt to how many of its first tokens are also those of the prompt alone. Returns 0
 * after an error. */
static int llm_data_join(llm_data_file *f, const char *prompt, size_t n, const char *answer,
                         llm_data_tokens *tokens) {
    const char *eos = NULL;
    const size_t more = strlen(answer), ends = llm_data_eos(f->data, answer, &eos);
    char *text = (char *)malloc(n + more + ends + 1);
    int ok;
    if (!text) return llm_data_wrong(f, "not enough memory");
    memcpy(text, prompt, n);
    memcpy(text + n, answer, more);
    if (ends > 0) memcpy(text + n + more, eos, ends);
    ok = llm_data_encode(f, text, n + more + ends, 1, tokens);
    if (ok) tokens->prompt = llm_data_shared(f, tokens, text, n, 1);
    free(text);
    return ok && tokens->prompt >= 0;
}

/* Adds the document of a line {"text": ...}. Returns 0 after an error. */
static int llm_data_text(llm_data_file *f, const cJSON *item) {
    const char *text = cJSON_GetStringValue(item);
    llm_data_tokens tokens = {NULL, 0, 0};
    int ok;
    if (!text) return llm_data_wrong(f, "\"text\" is no string");
    if (!*text) return llm_data_wrong(f, "\"text\" is empty");
    ok = llm_data_join(f, "", 0, text, &tokens) && llm_data_document(f, &tokens);
    free(tokens.ids);
    return ok;
}

/* -- conversations ------------------------------------------------------------------ */

/* Appends a message to the conversation f->messages: item, which is element i of the list of this
 * key. Returns 0 after an error. */
static int llm_data_message(llm_data_file *f, const char *key, int i, const cJSON *item) {
    static const char *const roles[] = {"system", "user", "assistant"};
    const char *role = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(item, "role"));
    const char *text = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(item, "content"));
    int which = 0;
    if (!role || !text)
        return llm_data_wrong(f, "message %d of \"%s\" has no \"%s\" that is a string", i + 1, key,
                              role ? "content" : "role");
    while (which < 3 && strcmp(role, roles[which]) != 0) which++;
    if (which == 3)
        return llm_data_wrong(f,
                              "message %d of \"%s\" has the role \"%.40s\", and the template %s "
                              "knows system, user and assistant",
                              i + 1, key, role, f->data->desc.format->style->name);
    if (f->count == f->most) {
        const size_t most = 2 * f->most + 16;
        chat_message *messages = (chat_message *)realloc(f->messages, most * sizeof *messages);
        chat_span *spans = (chat_span *)realloc(f->spans, most * sizeof *spans);
        if (messages) f->messages = messages;
        if (spans) f->spans = spans;
        if (!messages || !spans) return llm_data_wrong(f, "not enough memory");
        f->most = most;
    }
    f->messages[f->count].role = (chat_role)which;
    f->messages[f->count++].text = text;
    return 1;
}

/* Appends the list of messages of this key to the conversation f->messages. Returns 0 after an
 * error. */
static int llm_data_messages(llm_data_file *f, const char *key, const cJSON *list) {
    const cJSON *item;
    int i = 0;
    const chat_format *format = f->data->desc.format;
    if (!cJSON_IsArray(list)) return llm_data_wrong(f, "\"%s\" is no list of messages", key);
    if (!format || !format->style)
        return llm_data_wrong(f, "\"%s\" is a conversation, and %s", key,
                              format && format->error[0] ? format->error
                                                         : "there is no chat template");
    if (!list->child) return llm_data_wrong(f, "\"%s\" has no message", key);
    cJSON_ArrayForEach(item, list) {
        if (!llm_data_message(f, key, i++, item)) return 0;
    }
    return 1;
}

/* Checks the order of the messages, and that no answer from messages[first] on is empty. Returns 0
 * after an error. */
static int llm_data_check(llm_data_file *f, size_t first) {
    const chat_style *style = f->data->desc.format->style;
    const size_t system = f->messages[0].role == CHAT_SYSTEM;
    /* 1: the template refuses a conversation in which user and assistant do not take turns */
    const int turns = style->place != CHAT_OWN || !*style->prompt;
    for (size_t i = system; i < f->count; i++) {
        const chat_message *m = &f->messages[i];
        const char *text = m->text;
        if (m->role == CHAT_SYSTEM)
            return llm_data_wrong(f, "message %zu is a system message, which only the first may be",
                                  i + 1);
        if (turns && m->role != ((i - system) % 2 ? CHAT_ASSISTANT : CHAT_USER))
            return llm_data_wrong(f,
                                  "message %zu is one of the %s; with the template %s user and "
                                  "assistant take turns, and the user begins",
                                  i + 1, m->role == CHAT_USER ? "user" : "assistant", style->name);
        if (m->role == CHAT_ASSISTANT && i >= first && chat_trim(&text, strlen(text)) == 0)
            return llm_data_wrong(f, "message %zu, an answer, is empty", i + 1);
    }
    return 1;
}

/* Renders the conversation and tokenizes it. For each answer messages[i] from messages[first] on,
 * sets spans[i] to its tokens [begin, end); sets tokens->prompt to the number of tokens before the
 * first of these answers. Returns 0 after an error. */
static int llm_data_render(llm_data_file *f, size_t first, llm_data_tokens *tokens) {
    chat_format *format = f->data->desc.format;
    char *text = chat_render_answers(format, f->messages, f->count, first, f->spans);
    size_t length, i;
    int ok;
    if (!text) return llm_data_wrong(f, "%s", format->error);
    length = strlen(text);
    ok = llm_data_encode(f, text, length, 0, tokens);
    tokens->prompt = -1;
    for (i = first; ok && i < f->count; i++) {
        chat_span *span = &f->spans[i];
        int64_t begin, end = tokens->count;
        if (f->messages[i].role != CHAT_ASSISTANT) continue;
        begin = llm_data_shared(f, tokens, text, span->begin, 0);
        if (span->end < length) end = llm_data_shared(f, tokens, text, span->end, 0);
        ok = begin >= 0 && end >= 0;
        if (!ok) break;
        span->begin = (size_t)begin;
        span->end = (size_t)(end > begin ? end : begin);
        if (tokens->prompt < 0) tokens->prompt = begin;
    }
    free(text);
    return ok;
}

/* Adds the document of a line {"messages": [...]}. Returns 0 after an error. */
static int llm_data_chat(llm_data_file *f, const cJSON *list) {
    llm_data_tokens tokens = {NULL, 0, 0};
    size_t first = 0;
    int ok;
    f->count = 0;
    if (!llm_data_messages(f, "messages", list)) return 0;
    while (first < f->count && f->messages[first].role != CHAT_ASSISTANT) first++;
    if (first == f->count)
        return llm_data_wrong(f, "\"messages\" has no answer: no message has the role assistant");
    if (!llm_data_check(f, first)) return 0;
    /* With desc.all, which gives all tokens a loss, only the last answer is rendered as one to
     * train on (with its thoughts, if the template has any), as in TRL. */
    for (size_t i = first; f->data->desc.all && i < f->count; i++)
        if (f->messages[i].role == CHAT_ASSISTANT) first = i;
    ok = llm_data_render(f, first, &tokens);
    if (ok && !f->data->desc.all) {
        llm_data_turn(&tokens, 0, tokens.count);
        for (size_t i = first; i < f->count; i++)
            if (f->messages[i].role == CHAT_ASSISTANT)
                llm_data_turn(&tokens, (int64_t)f->spans[i].begin, (int64_t)f->spans[i].end);
    }
    ok = ok && llm_data_document(f, &tokens);
    free(tokens.ids);
    return ok;
}

/* -- prompts with an answer, and preferences ------------------------------------------ */

/* Tokenizes a prompt and the answer after it, which are two texts or two conversations. prompt
 * NULL: the first `shared` bytes or messages of the answer are the prompt. key: the answer's key in
 * the JSON line. Returns 0 after an error. */
static int llm_data_answer(llm_data_file *f, const cJSON *prompt, const char *key,
                           const cJSON *answer, size_t shared, llm_data_tokens *tokens) {
    const char *text = cJSON_GetStringValue(answer);
    const char *before = prompt ? cJSON_GetStringValue(prompt) : text;
    size_t first = shared;
    if (text && before) {
        const size_t n = prompt ? strlen(before) : shared;
        const char *rest = prompt ? text : text + shared;
        if (!*rest) return llm_data_wrong(f, "\"%s\" is empty", key);
        return llm_data_join(f, before, n, rest, tokens);
    }
    if (text || before)
        return llm_data_wrong(f,
                              "\"prompt\" and \"%s\" are to be two strings, or two lists of "
                              "messages",
                              key);
    f->count = 0;
    if (prompt) {
        if (!llm_data_messages(f, "prompt", prompt)) return 0;
        first = f->count;
    }
    if (!llm_data_messages(f, key, answer)) return 0;
    if (first == f->count || f->messages[first].role != CHAT_ASSISTANT)
        return llm_data_wrong(f, "\"%s\" does not go on with a message of the assistant", key);
    if (first == 0) return llm_data_wrong(f, "there is no prompt before \"%s\"", key);
    return llm_data_check(f, first) && llm_data_render(f, first, tokens);
}

/* Adds the document of a line {"prompt": ..., "completion": ...}. Returns 0 after an error. */
static int llm_data_completion(llm_data_file *f, const cJSON *prompt, const cJSON *completion) {
    llm_data_tokens tokens = {NULL, 0, 0};
    int ok = llm_data_answer(f, prompt, "completion", completion, 0, &tokens);
    if (ok && !f->data->desc.all) llm_data_turn(&tokens, 0, tokens.prompt);
    ok = ok && llm_data_document(f, &tokens);
    free(tokens.ids);
    return ok;
}

/* Returns how many bytes or messages the two answers of a preference have in common at their
 * beginning, which are its prompt. The last character or message of the shorter answer is never
 * among them, so that no answer is empty after the prompt; neither is a space just before the
 * first difference of two texts, which TRL leaves to the answers. */
static size_t llm_data_common(const cJSON *chosen, const cJSON *rejected) {
    const char *a = cJSON_GetStringValue(chosen), *b = cJSON_GetStringValue(rejected);
    size_t n = 0;
    int differ;
    if (!a || !b) {
        const cJSON *x = chosen->child, *y = rejected->child;
        for (; x && y && x->next && y->next && cJSON_Compare(x, y, 1); x = x->next, y = y->next)
            n++;
        return n;
    }
    while (a[n] && a[n] == b[n]) n++;
    differ = a[n] && b[n];
    if (n > 0 && !differ) n--;
    /* goes back to the first byte of a UTF-8 character */
    while (n > 0 && ((unsigned char)a[n] & 0xC0) == 0x80) n--;
    return n > 0 && differ && a[n - 1] == ' ' ? n - 1 : n;
}

/* Adds the preference of a line {"prompt": ..., "chosen": ..., "rejected": ...}. Without a prompt,
 * or if it is a text and the answers are conversations, the prompt is what both answers begin
 * with. Returns 0 after an error. */
static int llm_data_pair(llm_data_file *f, const cJSON *prompt, const cJSON *chosen,
                         const cJSON *rejected) {
    llm_data_tokens pair[2] = {{NULL, 0, 0}, {NULL, 0, 0}};
    size_t shared = 0;
    int ok;
    if (prompt && cJSON_IsString(prompt) && cJSON_IsArray(chosen) && cJSON_IsArray(rejected))
        prompt = NULL;
    if (cJSON_IsString(chosen) != cJSON_IsString(rejected))
        return llm_data_wrong(f, "\"chosen\" and \"rejected\" are to be two strings, or two lists "
                                 "of messages");
    if (!prompt) shared = llm_data_common(chosen, rejected);
    ok = llm_data_answer(f, prompt, "chosen", chosen, shared, &pair[0]) &&
         llm_data_answer(f, prompt, "rejected", rejected, shared, &pair[1]);
    if (ok) {
        const int64_t same = pair[0].prompt < pair[1].prompt ? pair[0].prompt : pair[1].prompt;
        for (int k = 0; k < 2; k++) llm_data_turn(&pair[k], 0, same);
        ok = llm_data_preference(f, pair);
    }
    free(pair[0].ids);
    free(pair[1].ids);
    return ok;
}

/* -- lines of JSON ----------------------------------------------------------------------- */

/* Adds the document of a line of JSON, in any of its forms. Returns 0 after an error. */
static int llm_data_object(llm_data_file *f, const cJSON *json) {
    const cJSON *prompt = cJSON_GetObjectItemCaseSensitive(json, "prompt");
    const cJSON *chosen = cJSON_GetObjectItemCaseSensitive(json, "chosen");
    const cJSON *rejected = cJSON_GetObjectItemCaseSensitive(json, "rejected");
    const cJSON *messages = cJSON_GetObjectItemCaseSensitive(json, "messages");
    const cJSON *completion = cJSON_GetObjectItemCaseSensitive(json, "completion");
    const cJSON *text = cJSON_GetObjectItemCaseSensitive(json, "text");
    const int pair = chosen && rejected;
    const char *twice = cJSON_IsObject(json) ? llm_json_twice(json, 0) : NULL;
    if (!cJSON_IsObject(json))
        return llm_data_wrong(f, "this line is no object; each line is one {...}");
    if (twice) return llm_data_wrong(f, "the key \"%.100s\" occurs twice", twice);
    if (f->data->documents + f->data->dropped == 0) f->data->pairs = pair;
    if (pair != f->data->pairs)
        return llm_data_wrong(f,
                              "this line %s a preference, and the lines before it %s; keep them "
                              "in files of their own",
                              pair ? "is" : "is not", pair ? "are not" : "are");
    if (pair) return llm_data_pair(f, prompt, chosen, rejected);
    if (messages) return llm_data_chat(f, messages);
    if (prompt && completion) return llm_data_completion(f, prompt, completion);
    if (text) return llm_data_text(f, text);
    return llm_data_wrong(f,
                          "the object has none of these forms: {\"text\"}, {\"messages\"}, "
                          "{\"prompt\", \"completion\"}, {\"prompt\", \"chosen\", \"rejected\"}, "
                          "{\"chosen\", \"rejected\"}");
}

/* Returns 1 if the JSON text has the escape \u0000, at which a C string of its value would end. */
static int llm_data_zero(const char *line) {
    for (const char *at = line; (at = strchr(at, '\\')) != NULL; at += at[1] ? 2 : 1)
        if (strncmp(at, "\\u0000", 6) == 0) return 1;
    return 0;
}

/* Checks that a line of `length` bytes is text. Returns 0 after an error. */
static int llm_data_line_check(llm_data_file *f, const char *line, size_t length) {
    const size_t valid = llm_valid_prefix(line, length), ends = strlen(line);
    if (ends < length) return llm_data_wrong(f, "byte %zu of the line is 0", ends + 1);
    if (valid < length)
        return llm_data_wrong(f,
                              "byte %zu of the line is not UTF-8; convert the file, for example "
                              "by iconv -t UTF-8",
                              valid + 1);
    if (llm_data_zero(line)) return llm_data_wrong(f, "a string has a \\u0000, which is no text");
    return 1;
}

/* Parses a line of JSON. Returns NULL after an error. */
static cJSON *llm_data_parse(llm_data_file *f, const char *line) {
    char why[256];
    cJSON *json;
    /* cJSON alone accepts an escape such as \u12g4, and ends the string there */
    if (llm_json_explain(line, why, sizeof why)) {
        (void)llm_data_wrong(f, "this line is not JSON: %s; each line is one {...}",
                             strstr(why, "column")); /* skips "line 1, " at the beginning of why */
        return NULL;
    }
    json = llm_parse(line);
    if (!json) (void)llm_data_wrong(f, errno ? "not enough memory" : "this line is not JSON");
    return json;
}

/* Appends the documents of all lines of the file. Returns 0 after an error. */
LLM_DATA_API int llm_data_lines(llm_data_file *f) {
    size_t length;
    char *line;
    int any = 0;
    while ((line = llm_data_line(f, &length)) != NULL) {
        const size_t mark = f->line == 1 ? llm_data_mark(line, length) : 0;
        cJSON *json;
        int ok;
        line += mark;
        length -= mark;
        if (strspn(line, " \t\r") == length) continue;
        any = 1;
        if (!llm_data_line_check(f, line, length)) return 0;
        json = llm_data_parse(f, line);
        ok = json && llm_data_object(f, json);
        cJSON_Delete(json);
        if (!ok) return 0;
    }
    f->line = 0;
    if (f->data->error[0]) return 0;
    return any || llm_data_wrong(f, "the file is empty");
}

#endif
