// SPDX-License-Identifier: Apache-2.0

package nft

import (
	"bytes"
	"fmt"

	"github.com/google/nftables"
)

// Schema is what one of Podlace's tables contains for all pods: chains, rules and sets, whose elements belong to pods.
type Schema struct {
	Table   string
	Version uint16 // every change of the rules needs a new one
	Build   func(Ruleset) error
}

// schemaSet is a set with one element. The key is the version of the schema, so that a newer plugin replaces the rules of an older one; the
// comment is the number of rules, which shows that another program deleted some.
const schemaSet = "schema"

func markText(rules int) string { return fmt.Sprintf("version of the %d rules", rules) }

// Intact reports whether the kernel has the rules of this version. It only counts them, which is fast enough for ADD.
func (s Schema) Intact(c *Conn) (bool, error) {
	t, err := c.Open(s.Table)
	if err != nil {
		return false, err
	}
	mark, ok, err := t.Get(Element{Set: schemaSet, Key: BigEndian(s.Version)})
	if err != nil || !ok {
		return false, err
	}
	n, err := t.countRules()
	return mark.Comment == markText(n), err
}

// OfAnotherVersion reports whether the kernel has all rules of another version, which the next Install replaces.
func (s Schema) OfAnotherVersion(c *Conn) (bool, error) {
	t, err := c.Open(s.Table)
	if err != nil {
		return false, err
	}
	marks, err := t.List(schemaSet)
	if err != nil || len(marks) != 1 || bytes.Equal(marks[0].Key, BigEndian(s.Version)) {
		return false, err
	}
	n, err := t.countRules()
	return marks[0].Comment == markText(n), err
}

// Drift compares all chains and rules with the kernel's. It returns the difference as a sentence, or "".
func (s Schema) Drift(c *Conn) (string, error) {
	t, err := c.Open(s.Table)
	if err != nil {
		return "", err
	}
	drift, err := t.Drift(s.Build)
	if err == nil && drift == "" {
		var intact bool
		if intact, err = s.Intact(c); !intact {
			drift = "are those of another version, or another program added a chain"
		}
	}
	if err != nil || drift == "" {
		return "", err
	}
	return fmt.Sprintf("the rules of nftables table %s %s", TableOf(s.Table), drift), nil
}

// Install writes chains and rules, adds elements and sets the mark, in one transaction. Other elements stay.
func (s Schema) Install(elements []Element) error {
	return Install("nft add table "+s.Table, s.Table, func(r Ruleset) error {
		if err := s.Build(r); err != nil {
			return err
		}
		mark := &nftables.Set{Table: r.Table, Name: schemaSet, KeyType: nftables.TypeInetService}
		if err := r.AddSet(mark); err != nil {
			return err
		}
		r.C.FlushSet(mark)
		rules := 0
		for _, chain := range r.made {
			rules += len(chain.rules)
		}
		return r.AddElements(append(elements, Element{Set: schemaSet, Key: BigEndian(s.Version), Comment: markText(rules)}))
	})
}

// AddElements adds elements to sets of the ruleset.
func (r Ruleset) AddElements(elements []Element) error {
	for _, group := range bySet(elements) {
		var list []nftables.SetElement
		for _, e := range group {
			list = append(list, nftables.SetElement{Key: e.Key, KeyEnd: e.Last, IntervalEnd: e.KeyEnd, Val: e.Value, Comment: e.Comment})
		}
		set := r.sets[group[0].Set]
		if set == nil {
			return fmt.Errorf("nftables table %s has no set %s", r.Table.Name, group[0].Set)
		}
		if err := r.C.SetAddElements(set, list); err != nil {
			return err
		}
	}
	return nil
}
