#include "prefix_tree.h"

#include <stdlib.h>
#include <string.h>

#include "engine.h"

enum { PER_SLAB = 256 };

typedef struct Slab {
    struct Slab *next;
    union {
        Node node;
        Entry entry;
    } items[PER_SLAB];
} Slab;

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* --- keys */

typedef struct {
    uint64_t text;
    int64_t place;
} Key;

static Key key_of(const Keys *keys, int64_t block) {
    int64_t low = 0, high = keys->n_runs - 1;
    while (low < high) {
        int64_t middle = (low + high + 1) / 2;
        if (keys->runs[middle].start <= block)
            low = middle;
        else
            high = middle - 1;
    }
    return (Key){keys->runs[low].text, block - keys->runs[low].start};
}

static bool is_equal(Key a, Key b) { return a.text == b.text && a.place == b.place; }

/* Up to which block, at most `end`, a text goes on as the node, of which it has the first key. */
static int64_t agreed(const Node *node, const Keys *keys, int64_t end) {
    int64_t low = node->start + 1, high = least(node->end, end);
    if (node->keys == keys || is_equal(key_of(node->keys, high - 1), key_of(keys, high - 1)))
        return high;
    high--;
    while (low < high) {
        int64_t middle = (low + high + 1) / 2;
        if (is_equal(key_of(node->keys, middle - 1), key_of(keys, middle - 1)))
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

/* --- nodes, found by the key of their first block, which no two nodes share */

static Node **bucket_of(const PrefixTree *tree, Key key) {
    uint64_t hash = (key.text ^ ((uint64_t)key.place << 40)) * 0x9E3779B97F4A7C15u;
    hash = (hash ^ (hash >> 29) ^ (uint64_t)key.place) * 0xBF58476D1CE4E5B9u;
    return &tree->buckets[(hash >> 20) & (uint64_t)(tree->n_buckets - 1)];
}

static Node *child_with(const PrefixTree *tree, const Keys *keys, int64_t at) {
    if (!tree->n_buckets)
        return NULL;
    Key key = key_of(keys, at);
    for (Node *node = *bucket_of(tree, key); node != NULL; node = node->in_bucket)
        if (is_equal(key_of(node->keys, node->start), key))
            return node;
    return NULL;
}

static void grow_buckets(PrefixTree *tree) {
    int64_t n_before = tree->n_buckets, n = n_before ? 2 * n_before : 1024;
    Node **before = tree->buckets;
    tree->buckets = allotted(tree->simulation, (size_t)n * sizeof *before);
    memset(tree->buckets, 0, (size_t)n * sizeof *before);
    tree->n_buckets = n;
    for (int64_t k = 0; k < n_before; k++)
        for (Node *node = before[k], *next; node != NULL; node = next) {
            next = node->in_bucket;
            Node **bucket = bucket_of(tree, key_of(node->keys, node->start));
            node->in_bucket = *bucket;
            *bucket = node;
        }
    free(before);
}

static void take_slab(PrefixTree *tree, bool is_of_nodes) {
    Slab *slab = allotted(tree->simulation, sizeof *slab);
    slab->next = tree->slabs;
    tree->slabs = slab;
    for (int k = 0; k < PER_SLAB; k++)
        if (is_of_nodes) {
            slab->items[k].node.after = tree->unused;
            tree->unused = &slab->items[k].node;
        } else {
            slab->items[k].entry.after = tree->unused_entry;
            tree->unused_entry = &slab->items[k].entry;
        }
}

static void adopt(Node *parent, Node *node) {
    node->parent = parent;
    node->before = NULL;
    node->after = parent->first_child;
    if (node->after != NULL)
        node->after->before = node;
    parent->first_child = node;
    parent->n_children++;
}

static Node *new_node(PrefixTree *tree, Keys *keys, int64_t start, int64_t end, Node *parent) {
    if (tree->n_nodes >= tree->n_buckets)
        grow_buckets(tree);
    if (tree->unused == NULL)
        take_slab(tree, true);
    Node *node = tree->unused;
    tree->unused = node->after;
    *node = (Node){.keys = keys, .start = start, .end = end};
    keys->n_refs++;
    adopt(parent, node);
    Node **bucket = bucket_of(tree, key_of(keys, start));
    node->in_bucket = *bucket;
    *bucket = node;
    tree->n_nodes++;
    return node;
}

static void drop_node(PrefixTree *tree, Node *node) {
    Node *parent = node->parent;
    if (node->before != NULL)
        node->before->after = node->after;
    else
        parent->first_child = node->after;
    if (node->after != NULL)
        node->after->before = node->before;
    parent->n_children--;
    Node **link = bucket_of(tree, key_of(node->keys, node->start));
    while (*link != node)
        link = &(*link)->in_bucket;
    *link = node->in_bucket;
    tree->n_nodes--;
    keys_release(tree->simulation, node->keys);
    node->after = tree->unused;
    tree->unused = node;
}

/* Remove a gap with nothing behind it, and the gaps before it. */
static void prune(PrefixTree *tree, Node *node) {
    while (!node->has_blocks && !node->n_children && node->parent != NULL) {
        Node *parent = node->parent;
        drop_node(tree, node);
        node = parent;
    }
}

/* --- idle nodes, in entries of those that were freed together */

static void insert_idle(Entry *entry, Node *before, Node *node) {
    node->entry = entry;
    node->idle_before = before;
    node->idle_after = before == NULL ? entry->first : before->idle_after;
    if (node->idle_after != NULL)
        node->idle_after->idle_before = node;
    else
        entry->last = node;
    if (before != NULL)
        before->idle_after = node;
    else
        entry->first = node;
}

static void remove_idle(PrefixTree *tree, Node *node) {
    Entry *entry = node->entry;
    node->entry = NULL;
    if (node->idle_before != NULL)
        node->idle_before->idle_after = node->idle_after;
    else
        entry->first = node->idle_after;
    if (node->idle_after != NULL)
        node->idle_after->idle_before = node->idle_before;
    else
        entry->last = node->idle_before;
    if (entry->first != NULL)
        return;
    if (entry->before != NULL)
        entry->before->after = entry->after;
    else
        tree->first_idle = entry->after;
    if (entry->after != NULL)
        entry->after->before = entry->before;
    else
        tree->last_idle = entry->before;
    entry->after = tree->unused_entry;
    tree->unused_entry = entry;
}

static Entry *new_entry(PrefixTree *tree) {
    if (tree->unused_entry == NULL)
        take_slab(tree, false);
    Entry *entry = tree->unused_entry;
    tree->unused_entry = entry->after;
    *entry = (Entry){.before = tree->last_idle};
    if (tree->last_idle != NULL)
        tree->last_idle->after = entry;
    else
        tree->first_idle = entry;
    tree->last_idle = entry;
    return entry;
}

/* Divide a node, which keeps its beginning. Returns the rest. */
static Node *divide(PrefixTree *tree, Node *node, int64_t at) {
    tree->n_changes++;
    Node *children = node->first_child;
    int64_t n_children = node->n_children;
    node->first_child = NULL;
    node->n_children = 0;
    Node *rest = new_node(tree, node->keys, at, node->end, node);
    rest->n_owners = node->n_owners;
    rest->has_blocks = node->has_blocks;
    rest->first_child = children;
    rest->n_children = n_children;
    for (Node *child = children; child != NULL; child = child->after)
        child->parent = rest;
    node->end = at;
    if (node->entry != NULL)
        insert_idle(node->entry, node, rest);
    return rest;
}

/* --- runs */

static void append_run(PrefixTree *tree, Runs *runs, TreeRun run) {
    runs->runs = grown(
        tree->simulation, runs->runs, runs->n + 1, &runs->most, sizeof *runs->runs
    );
    runs->runs[runs->n++] = run;
}

static Node *last_node(const PrefixTree *tree, TreeRun *run, const Keys *keys) {
    while (run->last->end < run->end)
        run->last = child_with(tree, keys, run->last->end);
    return run->last;
}

static void added(PrefixTree *tree, Node *node, Runs *runs) {
    node->has_blocks = true;
    node->n_owners = 1;
    TreeRun *before = runs->n ? &runs->runs[runs->n - 1] : NULL;
    if (before != NULL && before->end == node->start) {
        before->end = node->end;
        before->last = node;
    } else {
        append_run(tree, runs, (TreeRun){node->start, node->end, node, node});
    }
}

/* --- the interface */

void tree_init(PrefixTree *tree, struct Simulation *simulation) {
    memset(tree, 0, sizeof *tree);
    tree->simulation = simulation;
}

void tree_free(PrefixTree *tree) {
    for (Slab *slab = tree->slabs, *next; slab != NULL; slab = next) {
        next = slab->next;
        free(slab);
    }
    free(tree->buckets);
}

int64_t tree_find(const PrefixTree *tree, const Keys *keys, int64_t n, Node **last) {
    int64_t at = 0;
    *last = NULL;
    while (at < n) {
        Node *node = child_with(tree, keys, at);
        if (node == NULL || !node->has_blocks)
            break;
        at = agreed(node, keys, n);
        *last = node;
        if (at < node->end)
            break;
    }
    return at;
}

int64_t tree_own(PrefixTree *tree, Node *last, int64_t n, Runs *runs) {
    int64_t n_idle = tree->n_idle;
    Node *first = last;
    if (n < last->end)
        divide(tree, last, n);
    for (Node *node = last; node->parent != NULL; node = node->parent) {
        if (!node->n_owners) {
            remove_idle(tree, node);
            tree->n_idle -= node->end - node->start;
        }
        node->n_owners++;
        first = node;
    }
    append_run(tree, runs, (TreeRun){0, n, first, last});
    return n_idle - tree->n_idle;
}

/* The node that ends at block `to` of a text; a gap where the text is unknown. */
static Node *descend(PrefixTree *tree, Keys *keys, int64_t to) {
    Node *node = &tree->root;
    int64_t at = 0;
    while (at < to) {
        Node *child = child_with(tree, keys, at);
        if (child == NULL)
            return new_node(tree, keys, at, to, node);
        at = agreed(child, keys, to);
        if (at < child->end)
            divide(tree, child, at);
        node = child;
    }
    return node;
}

void tree_add(PrefixTree *tree, Keys *keys, int64_t start, int64_t end, Runs *runs) {
    tree->n_changes++;
    Node *node = NULL;
    TreeRun *run = runs->n ? &runs->runs[runs->n - 1] : NULL;
    if (run != NULL && run->end == start) {
        node = last_node(tree, run, keys);
        if (node->keys == keys && node->n_owners == 1 && !node->n_children) {
            node->end = run->end = end;
            return;
        }
    }
    if (node == NULL)
        node = descend(tree, keys, start);
    for (int64_t at = start; at < end;) {
        Node *child = child_with(tree, keys, at);
        if (child == NULL) {
            added(tree, new_node(tree, keys, at, end, node), runs);
            return;
        }
        int64_t until = agreed(child, keys, end);
        if (child->has_blocks && until == end)
            return;
        if (until < child->end)
            divide(tree, child, until);
        if (!child->has_blocks)
            added(tree, child, runs);
        node = child;
        at = until;
    }
}

int64_t tree_give_up(PrefixTree *tree, const Keys *keys, int64_t n_blocks, Runs *runs) {
    int64_t n_freed = 0, end = n_blocks;
    Entry *entry = NULL;
    for (int64_t k = runs->n - 1; k >= 0; k--) {
        TreeRun *run = &runs->runs[k];
        n_freed += end - run->end;
        end = run->start;
        for (Node *node = last_node(tree, run, keys);; node = node->parent) {
            if (!--node->n_owners) {
                if (entry == NULL)
                    entry = new_entry(tree);
                insert_idle(entry, NULL, node);
                tree->n_idle += node->end - node->start;
                n_freed += node->end - node->start;
            }
            if (node == run->first)
                break;
        }
    }
    runs->n = 0;
    return n_freed + end;
}

void tree_evict(PrefixTree *tree, int64_t n) {
    tree->n_idle -= n;
    while (n) {
        Node *node = tree->first_idle->last;
        int64_t n_here = node->end - node->start;
        if (n_here > n && node->n_children) {
            node = divide(tree, node, node->end - n);
            n_here = n;
        }
        if (n_here > n) {
            n_here = n;
            node->end -= n;
        } else {
            remove_idle(tree, node);
            node->has_blocks = false;
            prune(tree, node);
        }
        n -= n_here;
        tree->n_changes++;
    }
}
