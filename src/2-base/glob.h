/* ========================================================================== */
/* >>glob                                              MARK: - glob (private) */
/* Matches dotted names with patterns of *, **, ? and [sets], and rewrites    */
/* them.                                                                      */
/* Needs: >>base.                                                             */
/* ========================================================================== */

/* Sets *has to 1 if c is in the set that begins at p, else to 0. Sets are, for example, "[qkv]",
 * "[0-9]" and "[!qkv]", all characters but q, k and v. Returns the distance from p to the closing
 * bracket. If there is none, returns 0: the bracket at p is then an ordinary character. */
static int tshi_glob_set(const char *p, const char *p_end, char c, int *has) {
    const char *at = p + 1;
    const int others = at < p_end && *at == '!';
    const char *first = at += others; /* a ']' here is a member of the set */
    for (*has = others; at < p_end && (*at != ']' || at == first); at++) {
        const char low = *at;
        if (at + 2 < p_end && at[1] == '-' && at[2] != ']') at += 2; /* a range, such as 0-9 */
        if (low <= c && c <= *at) *has = !others;
    }
    return at < p_end ? (int)(at - p) : 0;
}

enum { TSHI_GLOB_CAPTURES = 8 }; /* max wildcards of a pattern whose matched texts are kept */

/* The texts that the wildcards * and ** of a pattern match in a path, in order: [from, to). */
typedef struct tshi_captures {
    const char *from[TSHI_GLOB_CAPTURES], *to[TSHI_GLOB_CAPTURES];
    int count; /* wildcards matched so far; texts of the first TSHI_GLOB_CAPTURES are kept */
} tshi_captures;

/* Sets the text of wildcard k to [from, to), and removes those of later wildcards. */
static void tshi_glob_capture(tshi_captures *captures, int k, const char *from, const char *to) {
    if (k < TSHI_GLOB_CAPTURES) captures->from[k] = from;
    if (k < TSHI_GLOB_CAPTURES) captures->to[k] = to;
    captures->count = k + 1;
}

/* Returns 1 if the name [s, s_end) matches the pattern [p, p_end), in which * matches any
 * characters, ? one character, and [...] one character of a set. */
static int tshi_glob_name(const char *p, const char *p_end, const char *s, const char *s_end,
                          tshi_captures *captures) {
    for (; p < p_end; p++, s++) {
        if (*p == '*') {
            const char *from = s;
            const int k = captures->count;
            for (; s <= s_end; s++) { /* tries every length of the text that * matches */
                tshi_glob_capture(captures, k, from, s);
                if (tshi_glob_name(p + 1, p_end, s, s_end, captures)) return 1;
            }
            return 0;
        }
        int has = 0, set = *p == '[' && s < s_end ? tshi_glob_set(p, p_end, *s, &has) : 0;
        if (s >= s_end || (set ? !has : *p != '?' && *p != *s)) return 0;
        p += set;
    }
    return s == s_end;
}

/* Does what tshi_glob_match does, and appends the texts that wildcards match to captures. */
static int tshi_glob_into(const char *p, const char *s, tshi_captures *captures) {
    const char *pe = p, *se = s;                       /* pe, se: ends of the first names */
    while (*pe && *pe != '.') pe++;                    /* end of the pattern's first name */
    while (*se && *se != '.') se++;                    /* end of the path's first name */
    if (!*p) return !*s;                               /* the pattern ends: so must the path */
    if (pe - p == 2 && p[0] == '*' && p[1] == '*') {   /* the first name of the pattern is ** */
        const char *rest = *pe ? pe + 1 : pe, *at = s; /* rest: pattern after **; at: path's rest */
        const int k = captures->count;
        for (;; at = *se ? se + 1 : se) { /* each time, ** matches one name more */
            tshi_glob_capture(captures, k, s, at > s && at[-1] == '.' ? at - 1 : at);
            if (tshi_glob_into(rest, at, captures)) return 1;
            if (!*at) return 0;
            for (se = at; *se && *se != '.';) se++;
        }
    }
    if (!*s || !tshi_glob_name(p, pe, s, se, captures)) return 0;
    return tshi_glob_into(*pe ? pe + 1 : pe, *se ? se + 1 : se, captures);
}

/* Returns 1 if the dotted path s matches the pattern p, name by name (see tshi_glob_name); **
 * matches any number of names, also none. */
static int tshi_glob_match(const char *p, const char *s) {
    tshi_captures captures;
    captures.count = 0;
    return tshi_glob_into(p, s, &captures);
}

/* Writes the pattern `to` to out, with its * and ** replaced by the captured texts in order.
 * Returns 0 if there are fewer captures than wildcards, or if out would need more than `size`
 * bytes. */
static int tshi_glob_replace(const char *to, const tshi_captures *captures, char *out,
                             size_t size) {
    size_t n = 0, length;
    int k = 0; /* index of the next wildcard of `to` */
    while (*to) {
        const char *from = to;
        const int many = to[0] == '*' && to[1] == '*';
        length = 1;
        if (*to == '*') {
            if (k >= captures->count || k >= TSHI_GLOB_CAPTURES) return 0;
            from = captures->from[k];
            length = (size_t)(captures->to[k] - from);
            k++;
        }
        to += 1 + many;
        /* If ** stands for no name, the dot after it in the pattern is skipped. */
        if (many && !length && *to == '.') to++;
        /* If ** stands for no name and ends the pattern, the dot before it is removed from out. */
        if (many && !length && !*to && n && out[n - 1] == '.') n--;
        if (n + length >= size) return 0;
        memcpy(out + n, from, length);
        n += length;
    }
    out[n] = '\0';
    return 1;
}
