// SPDX-License-Identifier: Apache-2.0

package pci

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// CPUList returns the IDs of the node's CPUs.
func (n Node) CPUList() []int {
	list, _ := parseList(n.CPUs, maxCPUs) // a node with only memory has none
	return list
}

// exclusiveRDMA reports whether the RDMA subsystem is in exclusive mode. Without its module, it is not.
func exclusiveRDMA(sysfs string) bool {
	shared, err := os.ReadFile(filepath.Join(sysfs, sharedRDMA))
	return err == nil && strings.TrimSpace(string(shared)) == "N"
}

// scanNodes reads the online NUMA nodes. A kernel without NUMA has none.
func scanNodes(root *os.Root) []Node {
	nodes := []Node{}
	online, err := readAttribute(root, nodesFolder+"/online")
	if err != nil {
		return nodes
	}
	ids, err := parseList(online, maxNodes)
	if err != nil {
		return nodes
	}
	for _, id := range ids {
		if f, err := openFolder(root, fmt.Sprintf("%s/node%d", nodesFolder, id)); err == nil {
			nodes = append(nodes, Node{ID: id, CPUs: f.text("cpulist"),
				Distance: parseAttribute(f, "distance", nil, parseDistances)})
			f.Close()
		}
	}
	// Distances are useless if their number is not that of the nodes.
	for i := range nodes {
		if len(nodes[i].Distance) != len(ids) || len(nodes) != len(ids) {
			nodes[i].Distance = nil
		}
	}
	return nodes
}
