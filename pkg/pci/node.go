// SPDX-License-Identifier: Apache-2.0

package pci

import (
	"fmt"
	"os"
)

// scanNodes reads the online NUMA nodes. A kernel without NUMA has none.
func scanNodes(root *os.Root) []Node {
	nodes := []Node{}
	online, err := readAttribute(root, nodesFolder+"/online")
	if err != nil {
		return nodes
	}
	ids, err := parseNodes(online)
	if err != nil {
		return nodes
	}
	for _, id := range ids {
		if f, err := openFolder(root, fmt.Sprintf("%s/node%d", nodesFolder, id)); err == nil {
			nodes = append(nodes, Node{ID: id, CPUs: value(f, "cpulist", "", parseCPUs), Distance: value(f, "distance", nil, parseDistances)})
			f.Close()
		}
	}
	// Distances are useless if their number does not match the nodes.
	for i := range nodes {
		if len(nodes[i].Distance) != len(ids) || len(nodes) != len(ids) {
			nodes[i].Distance = nil
		}
	}
	return nodes
}
