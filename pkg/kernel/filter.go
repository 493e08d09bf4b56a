// SPDX-License-Identifier: Apache-2.0

package kernel

import "golang.org/x/sys/unix"

// program is a socket filter in classic BPF (Documentation/networking/filter.rst) with forward jumps to labels.
type program struct {
	list   []unix.SockFilter
	labels map[string]int
	jumps  map[int]string // target label of each jump
}

// netlinkAttribute is SKF_AD_OFF + SKF_AD_NLATTR of include/uapi/linux/filter.h. A load from this offset searches for an attribute.
const netlinkAttribute = 0xffff_f000 + 12

func newProgram() *program { return &program{labels: map[string]int{}, jumps: map[int]string{}} }

func (p *program) add(code uint16, k uint32) {
	p.list = append(p.list, unix.SockFilter{Code: code, K: k})
}

func (p *program) label(name string) { p.labels[name] = len(p.list) }

func (p *program) jump(label string) {
	p.jumps[len(p.list)] = label
	p.add(unix.BPF_JMP|unix.BPF_JA, 0)
}

// jumpIf jumps to a label if the loaded value compares true with value: BPF_JEQ, BPF_JGE, or BPF_JSET for bits.
func (p *program) jumpIf(test uint16, value uint32, label string) {
	p.jumps[len(p.list)] = label
	p.add(unix.BPF_JMP|unix.BPF_K|test, value)
}

// load loads 1 or 2 bytes of the message.
func (p *program) load(at uint32, size int) {
	p.add(map[int]uint16{1: unix.BPF_B, 2: unix.BPF_H}[size]|unix.BPF_LD|unix.BPF_ABS, at)
}

// attribute loads the offset of an attribute, searching from an offset on; 0 if it is missing.
func (p *program) attribute(kind, from uint32) {
	p.add(unix.BPF_LDX|unix.BPF_IMM, kind)
	p.add(unix.BPF_LD|unix.BPF_IMM, from)
	p.add(unix.BPF_LD|unix.BPF_B|unix.BPF_ABS, netlinkAttribute)
}

// end returns from the filter: passes is the number of bytes of the message that pass.
func (p *program) end(passes uint32) { p.add(unix.BPF_RET|unix.BPF_K, passes) }

func (p *program) assemble() []unix.SockFilter {
	for at, label := range p.jumps {
		skip := p.labels[label] - at - 1
		if p.list[at].Code == unix.BPF_JMP|unix.BPF_JA {
			p.list[at].K = uint32(skip)
		} else {
			p.list[at].Jt = uint8(skip)
		}
	}
	return p.list
}
