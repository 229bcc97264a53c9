// The host's parameters for the choice of one token. The structs match the Rust side field by field.
#pragma once

// Parameters for one row of logits: 64 bytes. Entries of the lists lie in arrays that all rows share.
struct SampleRow {
    unsigned long long quantile; // u of the draw in units of 2^-64, by the request's seed and the token's index
    float temperature;           // 0: the largest logit, ties by lowest token
    float top_p;                 // 1: off
    float min_p;                 // 0: off
    unsigned top_k;              // 0: off
    float repetition_penalty;    // 1: off
    float frequency_penalty;
    float presence_penalty;
    int first_used;              // tokens of prompt and answer, for the penalties: entries of `used`
    int used_count;
    int first_bias;              // entries of `biases`
    int bias_count;
    int first_mask_word;         // words of `masks`: bit t % 32 of word t / 32 is set if token t may follow
    int mask_words;              // -1: no mask; tokens past the last word must not follow
    int reserved;
};

// A token that occurs in the prompt or the answer. A row lists a token only once.
struct UsedToken {
    unsigned token;
    unsigned answer_count;       // occurrences in the answer; 0: in the prompt only
};

// A row lists a token only once.
struct TokenBias {
    unsigned token;
    float bias;
};
