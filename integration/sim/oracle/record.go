// SPDX-License-Identifier: Apache-2.0

package main

// What is recorded. The test of the port reads it, with types of its own: that is another module, so that the versions here are Kubernetes' own.

// A hint is twice its mask of NUMA nodes, and one more if it is preferred. A list that is null does not care.
type (
	hint  uint64
	lists [][]hint
)

type recording struct {
	Kubernetes string  `json:"kubernetes"`
	Merges     []merge `json:"merges"`
	Nodes      []node  `json:"nodes"`
}

// merge is one question to a policy.
type merge struct {
	Policy  string `json:"policy"`
	Machine uint64 `json:"machine"` // mask
	Lists   lists  `json:"lists"`
	Best    hint   `json:"best"`
	Admit   bool   `json:"admit"`
}

// node is a kubelet.
type node struct {
	Policy   string   `json:"policy"`
	PodScope bool     `json:"podScope,omitempty"`
	Machine  int      `json:"machine"` // NUMA nodes
	Near     []uint64 `json:"near"`    // masks, by device
	CPUs     int      `json:"cpus"`    // near each node, 0 without a static policy
	Plugin   string   `json:"plugin"`  // what it prefers
	Steps    []step   `json:"steps"`
}

// step is one pod that comes, and before it pods that go.
type step struct {
	Gone       []int    `json:"gone,omitempty"` // by number of their step
	Healthy    string   `json:"healthy"`        // 0 or 1 for each device
	Init       [][2]int `json:"init,omitempty"` // devices and CPUs of each container
	Containers [][2]int `json:"containers"`

	Lists  []lists    `json:"lists"`  // those of each time that the policy was asked
	Hints  []hint     `json:"hints"`  // of each container that was admitted
	Asked  []question `json:"asked"`  // of the plugin
	Reason string     `json:"reason"` // why the pod is refused
	VFs    [][]int    `json:"vfs"`    // by container
	Taken  [][]int    `json:"taken"`  // CPUs, by container
}

// question is a GetPreferredAllocation.
type question struct {
	Available []int `json:"available"`
	Must      []int `json:"must"`
	Size      int   `json:"size"`
}
