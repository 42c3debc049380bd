/* The prefix cache: `PrefixTree` of state/prefix_tree.py, which documents it. Blocks have no numbers
 * here: the tree counts those that are owned and those that are idle. */
#ifndef PREFIX_TREE_H
#define PREFIX_TREE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct Simulation;

/* The texts of a prompt: that of `runs[k]` begins with the block `start`, and the last goes on for
 * ever. Two blocks have equal keys where text and place in it are equal. */
typedef struct {
    int64_t start;
    uint64_t text;
} KeyRun;

typedef struct Keys {
    struct Keys *before, *after; /* all keys of a simulation */
    int64_t n_refs, n_runs;
    KeyRun runs[];
} Keys;

typedef struct Node Node;
typedef struct Entry Entry;

struct Node {
    Keys *keys;
    int64_t start, end, n_owners, n_children;
    bool has_blocks;
    Node *parent, *first_child, *before, *after; /* among the children of its parent */
    Node *in_bucket;
    Entry *entry;
    Node *idle_before, *idle_after; /* in its entry */
};

struct Entry {
    Node *first, *last;
    Entry *before, *after;
};

typedef struct {
    int64_t start, end;
    Node *first, *last;
} TreeRun;

typedef struct {
    struct Simulation *simulation;
    Node root, **buckets, *unused;
    Entry *first_idle, *last_idle, *unused_entry;
    void *slabs;
    int64_t n_buckets, n_nodes, n_idle, n_changes;
} PrefixTree;

/* The runs of a request that are in the tree. */
typedef struct {
    TreeRun *runs;
    int64_t n, most;
} Runs;

void tree_init(PrefixTree *tree, struct Simulation *simulation);
void tree_free(PrefixTree *tree);
/* How many of the first `n` blocks of a text are cached, and the node with the last. */
int64_t tree_find(const PrefixTree *tree, const Keys *keys, int64_t n, Node **last);
/* Own the first `n` blocks of a text, of which `last` has the last; returns how many were idle. */
int64_t tree_own(PrefixTree *tree, Node *last, int64_t n, Runs *runs);
void tree_add(PrefixTree *tree, Keys *keys, int64_t start, int64_t end, Runs *runs);
/* Give up `n_blocks` blocks, `runs` of them in the tree; returns how many have no owner any more. */
int64_t tree_give_up(PrefixTree *tree, const Keys *keys, int64_t n_blocks, Runs *runs);
void tree_evict(PrefixTree *tree, int64_t n);

void keys_release(struct Simulation *simulation, Keys *keys);

#endif
