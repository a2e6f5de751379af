// Experts of up to 8 or 16 tokens in two launches, for Hopper, as early_experts.cu has them, and in sums of the same order: but
// weights of an expert are read once for all tokens that chose it. experts_once.py compiles it at run time, once for each launch.
//
// Of tensor cores' products a token is a column. Weights go through registers, some chunks at once. Values of a token are quantised
// by each block for itself and lie in e4m3, so that those of eight tokens leave room for other blocks. Of 16 tokens few experts have
// more than eight: those read their weights again for the others.

#include "few_experts.cuh"

constexpr int NONE = 255;      // in place of a choice
constexpr int TILE = 8;        // tokens that a warp multiplies at once
constexpr int VALUES = 8;      // of gate that a block has, and those of up that belong to them
constexpr int COLUMNS = 16;    // of every token's sum that a block of the second launch has
constexpr int LANES = 32 / TOKENS, OF_LANE = (CHOSEN + LANES - 1) / LANES;  // of a token, and choices that one of them has
constexpr int MOST_PAIRS = TOKENS * CHOSEN;
static_assert(TOKENS == 8 || TOKENS == 16, "other numbers of lanes do not meet");

// In the first launch a warp has some groups of hidden states; rows of them are 64 bytes further than banks repeat.
constexpr int WARPS = 8, OF_WARP = GROUPS / WARPS, CHUNKS = OF_WARP * OF_GROUP;
constexpr int ROOM = TOKENS == TILE ? 4 : 6, AHEAD = CHUNKS < ROOM ? CHUNKS : ROOM;  // chunks that registers have room for
static_assert(GROUPS % WARPS == 0 && OF_WARP <= 16, "a warp has whole groups, and a lane one scale");
constexpr uint32_t ROW = OF_WARP * GROUP + 64;
constexpr uint32_t SCALES_AT = WARPS * TILE * ROW, WEIGHTS_AT = SCALES_AT + GROUPS * TILE * 4;
constexpr uint32_t SUMS_AT = WEIGHTS_AT + GROUPS * 2 * 4;  // behind scales of gate and of up
constexpr uint32_t GATE_UP_BYTES = SUMS_AT + WARPS * TILE * 2 * VALUES * 4;

// In the second one a warp has some of the experts, one after the other.
constexpr int CHUNKS_OF_WIDTH = GROUPS_OF_WIDTH * OF_GROUP, SLOTS = TOKENS * EACH;
constexpr uint32_t INNER_ROW = WIDTH + (TOKENS == 8 ? 64 : 0);  // more than banks repeat after, where there is room
constexpr uint32_t INNER_SCALES_AT = SLOTS * INNER_ROW, GIVEN_AT = INNER_SCALES_AT + SLOTS * GROUPS_OF_WIDTH * 4;
constexpr uint32_t EXPERTS_AT = GIVEN_AT + SLOTS * COLUMNS * 4, SHARES_AT = EXPERTS_AT + MOST_PAIRS * 4;
constexpr uint32_t FIRSTS_AT = SHARES_AT + MOST_PAIRS * 4, LIST_AT = FIRSTS_AT + MOST_PAIRS * 4, LEADERS_AT = LIST_AT + MOST_PAIRS * 4;
constexpr uint32_t DOWN_BYTES = LEADERS_AT + (MOST_PAIRS + 31) / 32 * 4;
[[maybe_unused]] constexpr uint32_t SHARED_BYTES = 16 + (GATE_UP_BYTES > DOWN_BYTES ? GATE_UP_BYTES : DOWN_BYTES);

// Some lanes have the choices of one token.
struct Choices {
    int experts[OF_LANE];

    __device__ __forceinline__ Choices(const Experts& a, const Place& of) {
        const int token = of.lane / LANES;
#pragma unroll
        for (int part = 0; part < OF_LANE; ++part) {
            const int choice = part * LANES + of.lane % LANES;
            experts[part] = token < a.tokens && choice < CHOSEN ? a.chosen[token * CHOSEN + choice] : -1;
        }
    }

    // Which choice of the lane's token an expert is, the first one that is, or NONE.
    __device__ __forceinline__ uint32_t of_expert(const Place& of, int expert) const {
        uint32_t choice = NONE;
#pragma unroll
        for (int part = OF_LANE - 1; part >= 0; --part) {
            if (experts[part] == expert) choice = part * LANES + of.lane % LANES;
        }
#pragma unroll
        for (int lanes = 1; lanes < LANES; lanes *= 2) choice = min(choice, shuffle_from(choice, of.lane ^ lanes));
        return choice;
    }
};

// The tokens that have an expert.
struct Tokens {
    uint32_t choice;  // of the lane's token, or NONE
    uint32_t those;   // the first lane of each is a bit

    __device__ __forceinline__ Tokens(const Experts& a, const Place& of, const Choices& choices, bool is_shared, int expert) {
        const uint32_t everybodys = of.lane / LANES < a.tokens ? CHOSEN : NONE;
        choice = is_shared ? everybodys : choices.of_expert(of, expert);
        those = warp_ballot(choice != NONE && of.lane % LANES == 0);
    }

    __device__ __forceinline__ int tiles() const { return TOKENS == TILE ? 1 : (__popc(those) + TILE - 1) / TILE; }
};

// Of a tile of tokens, that of the lane's row: with eight tokens in all each has the row of its number.
struct Column {
    uint32_t choice;  // or NONE where the row has no token
    int token;
    uint32_t rows;    // that have one: the first of each row's four lanes is a bit

    __device__ __forceinline__ Column(const Place& of, const Tokens& tokens, int tile) {
        if constexpr (TOKENS == TILE) {
            choice = tokens.choice;
            token = of.row;
            rows = tokens.those;
        } else {
            const bool is_one = tokens.those >> of.lane & 1;
            const int rank = __popc(tokens.those & ((1u << of.lane) - 1)) - tile * TILE;
            int from = -1;
#pragma unroll
            for (int row = 0; row < TILE; ++row) {
                const uint32_t found = warp_ballot(is_one && rank == row);
                if (row == of.row) from = __ffs(found) - 1;
            }
            const uint32_t its_choice = shuffle_from(tokens.choice, max(from, 0));
            choice = from < 0 ? NONE : its_choice;
            token = max(from, 0) / LANES;
            rows = warp_ballot(from >= 0 && of.piece == 0);
        }
    }

    __device__ __forceinline__ int token_of(int row) const {
        return TOKENS == TILE ? row : static_cast<int>(shuffle_from(token, row * 4));
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_OF_SM) gate_up(const __grid_constant__ Experts a) {
    SHARED_MEMORY(memory);
    const uint32_t shared = (shared_address(memory) + 15) & ~15u;
    wait_for_inputs();
    let_others_begin();  // which then find the choices written
    const Place of;
    const bool is_shared = WITH_SHARED && blockIdx.y == 0;  // of all tokens, so it begins first
    const int pair = static_cast<int>(blockIdx.y) - WITH_SHARED, begin = of.warp * OF_WARP, value = blockIdx.x * VALUES;
    const Choices choices(a, of);
    const long long expert = is_shared ? 0 : a.chosen[pair];
    if (expert < 0) return;
    const Tokens tokens(a, of, choices, is_shared, static_cast<int>(expert));
    if (!is_shared) {
        const int first = __ffs(tokens.those) - 1;
        if (first / LANES * CHOSEN + static_cast<int>(shuffle_from(tokens.choice, first)) != pair) return;  // another block has it
    }
    const Weights& weights = is_shared ? a.shared_one : a.chosen_ones;
    const unsigned char* gates = weights.first + (expert * 2 * WIDTH + value + of.row) * HIDDEN + begin * GROUP + of.piece * 16;
    const uint32_t weights_at = shared + WEIGHTS_AT + begin * 8;
    if (of.lane < OF_WARP * 2) {
        const long long block = expert * 2 * GROUPS_OF_WIDTH + of.lane % 2 * GROUPS_OF_WIDTH + value / GROUP;
        copy_4(weights_at + of.lane * 4, weights.first_scales + block * GROUPS + begin + of.lane / 2, true);
    }
    uint4 upper[AHEAD], lower[AHEAD];
    const auto load = [&](int chunk) {
        upper[chunk % AHEAD] = load_once(gates + chunk * CHUNK);
        lower[chunk % AHEAD] = load_once(gates + WIDTH * HIDDEN + chunk * CHUNK);
    };
    const uint32_t tokens_at = shared + of.warp * TILE * ROW, scales_at = shared + SCALES_AT + begin * TILE * 4;
    for (int tile = 0, tiles = tokens.tiles(); tile < tiles; ++tile) {
        const Column column(of, tokens, tile);
#pragma unroll
        for (int chunk = 0; chunk < AHEAD; ++chunk) load(chunk);
        for (uint32_t left = column.rows; left; left &= left - 1) {
            const int row = (__ffs(left) - 1) / 4, token = column.token_of(row);
            uint2 values[OF_WARP];
#pragma unroll
            for (int group = 0; group < OF_WARP; ++group) values[group] = load_2(a.x + token * HIDDEN + (begin + group) * GROUP + of.lane * 4);
#pragma unroll
            for (int group = 0; group < OF_WARP; ++group) {
                const Quantised found = quantised_group(values[group], POWERS && is_shared);
                store_shared(tokens_at + row * ROW + group * GROUP + of.lane * 4, found.values);
                if (of.lane == 0) store_shared(scales_at + (group * TILE + row) * 4, __float_as_uint(found.scale));
            }
        }
        wait_for_copies();
        sync_warp();
        float gate[2] = {}, up[2] = {};
        const bool is_there = column.choice != NONE;
#pragma unroll
        for (int group = 0; group < OF_WARP; ++group) {
            float found[4] = {};
#pragma unroll
            for (int part = 0; part < OF_GROUP; ++part) {
                const int chunk = group * OF_GROUP + part;
                uint4 token{0, 0, 0, 0};
                if (is_there) token = load_shared_4(tokens_at + of.row * ROW + chunk * CHUNK + of.piece * 16);
                add_products(found, upper[chunk % AHEAD], lower[chunk % AHEAD], token);
                if (chunk + AHEAD < CHUNKS) load(chunk + AHEAD);
            }
            const uint2 of_tokens = load_shared_2(scales_at + (group * TILE + 2 * of.piece) * 4);
            const uint2 of_weights = load_shared_2(weights_at + group * 8);
            const float near = __uint_as_float(of_tokens.x), far = __uint_as_float(of_tokens.y);
            gate[0] += found[0] * (near * __uint_as_float(of_weights.x));
            gate[1] += found[1] * (far * __uint_as_float(of_weights.x));
            up[0] += found[2] * (near * __uint_as_float(of_weights.y));
            up[1] += found[3] * (far * __uint_as_float(of_weights.y));
        }
        if (tile > 0) meet<1, THREADS>();  // sums of the tile before have been read
#pragma unroll
        for (int next = 0; next < 2; ++next) {
            const uint32_t at = shared + SUMS_AT + ((of.warp * TILE + 2 * of.piece + next) * 2 * VALUES + of.row) * 4;
            store_shared(at, __float_as_uint(gate[next]));
            store_shared(at + VALUES * 4, __float_as_uint(up[next]));
        }
        const int row = threadIdx.x / VALUES % TILE, of_row = threadIdx.x % VALUES;
        const uint32_t its_choice = shuffle_from(column.choice, row * 4);
        const int token = column.token_of(row);
        meet<1, THREADS>();
        if (threadIdx.x >= TILE * VALUES || its_choice == NONE) continue;
        float gates_sum = 0, ups_sum = 0;
#pragma unroll
        for (int warp = 0; warp < WARPS; ++warp) {
            const uint32_t at = shared + SUMS_AT + ((warp * TILE + row) * 2 * VALUES + of_row) * 4;
            gates_sum += load_shared_float(at);
            ups_sum += load_shared_float(at + VALUES * 4);
        }
        const float2 both = rounded(gates_sum, ups_sum);
        const long long slot = token * EACH + static_cast<int>(its_choice);
        a.inner[slot * WIDTH + value + of_row] = static_cast<unsigned short>(pack_bf16(opened(both.x) * both.y, 0));
    }
}

// Where the weights of one expert of the second launch begin that a lane has, and scales of this block's columns.
struct Item {
    const unsigned char* values;
    const float* scales;
    int expert;  // -1 for the shared one

    __device__ __forceinline__ Item(const Experts& a, const Place& of, uint32_t list, int item) {
        const bool is_shared = WITH_SHARED && item == 0;
        expert = is_shared ? -1 : static_cast<int>(load_shared(list + (item - WITH_SHARED) * 4));
        const Weights& weights = is_shared ? a.shared_one : a.chosen_ones;
        const long long at = is_shared ? 0 : expert;
        const int column = blockIdx.x * COLUMNS;
        values = weights.second + (at * HIDDEN + column + of.row) * WIDTH + of.piece * 16;
        scales = weights.second_scales + (at * GROUPS + column / GROUP) * GROUPS_OF_WIDTH;
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_OF_SM) down(const __grid_constant__ Experts a) {
    constexpr int SUM_WARPS = THREADS / 32;
    static_assert(THREADS >= MOST_PAIRS, "a thread has one choice");
    SHARED_MEMORY(memory);
    const uint32_t shared = (shared_address(memory) + 15) & ~15u;
    const Place of;
    const Choices choices(a, of);
    const int pairs = a.tokens * CHOSEN, own = threadIdx.x;
    int expert = -1;
    if (own < pairs) {
        expert = a.chosen[own];
        store_shared(shared + EXPERTS_AT + own * 4, expert);
        store_shared(shared + SHARES_AT + own * 4, __float_as_uint(a.shares[own]));
    }
    meet<1, THREADS>();
    int first = own, first_of_token = own;  // choices of the same expert
    for (int other = own < pairs ? own - 1 : -1; other >= 0; --other) {
        if (static_cast<int>(load_shared(shared + EXPERTS_AT + other * 4)) != expert) continue;
        first = other;
        if (other / CHOSEN == own / CHOSEN) first_of_token = other;
    }
    const bool leads = expert >= 0 && first == own;
    const uint32_t leaders = warp_ballot(leads);
    if (own < pairs) store_shared(shared + FIRSTS_AT + own * 4, expert >= 0 ? first_of_token % CHOSEN : NONE);
    if (of.lane == 0 && own < pairs) store_shared(shared + LEADERS_AT + of.warp * 4, leaders);
    meet<1, THREADS>();
    int items = WITH_SHARED, before = 0;
    for (int warp = 0; warp * 32 < pairs; ++warp) {
        const int count = __popc(load_shared(shared + LEADERS_AT + warp * 4));
        items += count;
        before += warp < of.warp ? count : 0;
    }
    if (leads) store_shared(shared + LIST_AT + (before + __popc(leaders & ((1u << of.lane) - 1))) * 4, expert);
    meet<1, THREADS>();

    uint4 values[CHUNKS_OF_WIDTH][2];
    float of_weights[GROUPS_OF_WIDTH];
    const auto load = [&](const Item& item, int chunk) {
        values[chunk][0] = load_once(item.values + chunk * CHUNK);
        values[chunk][1] = load_once(item.values + 8 * WIDTH + chunk * CHUNK);
    };
    const auto load_scales = [&](const Item& item) {
#pragma unroll
        for (int group = 0; group < GROUPS_OF_WIDTH; ++group) of_weights[group] = item.scales[group];
    };
    int now = -1;
    if (of.warp < items) {
        const Item item(a, of, shared + LIST_AT, of.warp);
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS_OF_WIDTH; ++chunk) load(item, chunk);
        load_scales(item);
        now = item.expert;
    }
    wait_for_inputs();
    const auto is_read = [&](int slot) {  // whether the first launch wrote it
        const int choice = slot % EACH;
        return slot < a.tokens * EACH && (choice == CHOSEN || static_cast<int>(load_shared(shared + FIRSTS_AT + (slot / EACH * CHOSEN + choice) * 4)) == choice);
    };
    constexpr int AT_ONCE = 4;
    for (int begin = of.warp; begin < a.tokens * EACH; begin += AT_ONCE * SUM_WARPS) {
        uint2 rows[AT_ONCE][GROUPS_OF_WIDTH];
        bool there[AT_ONCE];
#pragma unroll
        for (int turn = 0; turn < AT_ONCE; ++turn) {
            const int slot = begin + turn * SUM_WARPS;
            there[turn] = is_read(slot);
            if (!there[turn]) continue;
#pragma unroll
            for (int group = 0; group < GROUPS_OF_WIDTH; ++group) rows[turn][group] = load_2(a.inner + slot * WIDTH + group * GROUP + of.lane * 4);
        }
#pragma unroll
        for (int turn = 0; turn < AT_ONCE; ++turn) {
            const int slot = begin + turn * SUM_WARPS;
            if (!there[turn]) continue;
#pragma unroll
            for (int group = 0; group < GROUPS_OF_WIDTH; ++group) {
                const Quantised found = quantised_group(rows[turn][group], POWERS && slot % EACH == CHOSEN);
                store_shared(shared + slot * INNER_ROW + group * GROUP + of.lane * 4, found.values);
                if (of.lane == 0) store_shared(shared + INNER_SCALES_AT + (slot * GROUPS_OF_WIDTH + group) * 4, __float_as_uint(found.scale));
            }
        }
    }
    meet<1, THREADS>();
    for (int turn = of.warp; turn < items; turn += SUM_WARPS) {
        const bool more = turn + SUM_WARPS < items;
        const Tokens tokens(a, of, choices, WITH_SHARED && now < 0, now);
        const Item next(a, of, shared + LIST_AT, more ? turn + SUM_WARPS : turn);
        now = next.expert;
        float weight_scales[GROUPS_OF_WIDTH];
#pragma unroll
        for (int group = 0; group < GROUPS_OF_WIDTH; ++group) weight_scales[group] = of_weights[group];
        if (more) load_scales(next);
        for (int tile = 0, tiles = tokens.tiles(); tile < tiles; ++tile) {
            const Column column(of, tokens, tile);
            const bool is_there = column.choice != NONE, loads = more && tile + 1 == tiles;
            const int slot = column.token * EACH + static_cast<int>(column.choice);
            float sums[4] = {};
#pragma unroll
            for (int group = 0; group < GROUPS_OF_WIDTH; ++group) {
                float found[4] = {};
                uint32_t of_token = 0;
                if (is_there) of_token = load_shared(shared + INNER_SCALES_AT + (slot * GROUPS_OF_WIDTH + group) * 4);
#pragma unroll
                for (int part = 0; part < OF_GROUP; ++part) {
                    const int chunk = group * OF_GROUP + part;
                    uint4 token{0, 0, 0, 0};
                    if (is_there) token = load_shared_4(shared + slot * INNER_ROW + chunk * CHUNK + of.piece * 16);
                    add_products(found, values[chunk][0], values[chunk][1], token);
                    if (loads) load(next, chunk);
                }
                const float near = __uint_as_float(shuffle_from(of_token, of.piece * 8)) * weight_scales[group];
                const float far = __uint_as_float(shuffle_from(of_token, of.piece * 8 + 4)) * weight_scales[group];
                sums[0] += found[0] * near;
                sums[1] += found[1] * far;
                sums[2] += found[2] * near;
                sums[3] += found[3] * far;
            }
#pragma unroll
            for (int next_one = 0; next_one < 2; ++next_one) {
                const int row = 2 * of.piece + next_one;
                const uint32_t its_slot = shuffle_from(is_there ? slot : ~0u, row * 4);
                if (its_slot == ~0u) continue;
                const uint32_t at = shared + GIVEN_AT + (its_slot * COLUMNS + of.row) * 4;
                store_shared(at, __float_as_uint(sums[next_one]));
                store_shared(at + 8 * 4, __float_as_uint(sums[2 + next_one]));
            }
        }
    }
    meet<1, THREADS>();
    for (int one = threadIdx.x; one < a.tokens * COLUMNS; one += THREADS) {
        const int token = one / COLUMNS, column = one % COLUMNS;
        const uint32_t given = shared + GIVEN_AT + (token * EACH * COLUMNS + column) * 4;
        float sum = 0;
#pragma unroll
        for (int choice = 0; choice < CHOSEN; ++choice) {
            const uint32_t at = (token * CHOSEN + choice) * 4, its_first = load_shared(shared + FIRSTS_AT + at);
            if (its_first == NONE) continue;
            sum += rounded(load_shared_float(given + its_first * COLUMNS * 4) * load_shared_float(shared + SHARES_AT + at), 0).x;
        }
        sum *= a.factor;
        if (WITH_SHARED) sum = rounded(sum, 0).x + rounded(load_shared_float(given + CHOSEN * COLUMNS * 4), 0).x;
        a.out[token * static_cast<long long>(HIDDEN) + blockIdx.x * COLUMNS + column] = static_cast<unsigned short>(pack_bf16(sum, 0));
    }
}
