// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"strings"
	"testing"
)

// allKinds has one key of each JSON type that occurs in configurations.
type allKinds struct {
	embedded
	Text  string   `json:"text"`
	Flag  bool     `json:"flag"`
	Count *uint32  `json:"count"`
	Small int16    `json:"small"`
	Share float64  `json:"share"`
	Words []string `json:"words"`
	IPAM  struct {
		embedded
		Ranges [][]struct {
			Subnet string `json:"subnet"`
		} `json:"ranges"`
	} `json:"ipam"`
}

// The error for a value of the wrong JSON type contains the key, the expected type and the actual one.
func TestWrongKinds(t *testing.T) {
	for config, want := range map[string]string{
		`{"text":7}`:                               "text is a number: want a string",
		`{"text":null,"flag":"yes"}`:               "flag is a string: want true or false",
		`{"flag":1}`:                               "flag is a number: want true or false",
		`{"text":true}`:                            "text is true or false: want a string",
		`{"count":-1}`:                             "count is -1: want a whole number from 0 on, of at most 32 bits",
		`{"count":"1"}`:                            "count is a string: want a whole number from 0 on, of at most 32 bits",
		`{"small":1.5}`:                            "small is 1.5: want a whole number of at most 16 bits",
		`{"small":70000}`:                          "small is 70000: want a whole number of at most 16 bits",
		`{"share":[]}`:                             "share is a list: want a number",
		`{"words":"a"}`:                            "words is a string: want a list of strings",
		`{"words":[["a"]]}`:                        "an entry of words is a list: want a string",
		`{"rate":"fast"}`:                          "rate is a string: want a whole number of at most 64 bits",
		`{"ipam":[]}`:                              "ipam is a list: want an object",
		`{"ipam":{"rate":{}}}`:                     "ipam.rate is an object: want a whole number of at most 64 bits",
		`{"ipam":{"ranges":{"subnet":"x"}}}`:       "ipam.ranges is an object: want a list of lists of objects",
		`{"ipam":{"ranges":[{"subnet":"x"}]}}`:     "an entry of ipam.ranges is an object: want a list of objects",
		`{"ipam":{"ranges":[["x"]]}}`:              "an entry of ipam.ranges is a string: want an object",
		`{"ipam":{"ranges":[[{"subnet":["x"]}]]}}`: "ipam.ranges.subnet is a list: want a string",
	} {
		r := newQuiet("ADD")
		r.Config = []byte(config)
		err := r.Decode(&allKinds{})
		if Code(err) != CodeDecode || err.Error() != "network configuration: "+want {
			t.Errorf("%s: %v, want %s", config, err, want)
		}
	}
}

// Errors in prevResult and in the lists of GC contain JSON types, and no Go types.
func TestWrongKindsElsewhere(t *testing.T) {
	for verb, more := range map[string]string{
		"GC":  `"cni.dev/valid-attachments":[{"containerID":7,"ifname":"x"}]`,
		"ADD": `"prevResult":{"cniVersion":"1.1.0","ips":7}`,
	} {
		rec := &recorder{}
		f := run(rec.plugin(), newEnv(verb).with("CNI_NETNS", "/nowhere"), config(more)).mustFail(t, CodeDecode)
		if strings.Contains(f.Msg, "Go ") || !strings.Contains(f.Msg, "a number") {
			t.Errorf("%s: %s", verb, f.Msg)
		}
	}
}
